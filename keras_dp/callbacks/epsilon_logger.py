"""``EpsilonLogger``: what training has cost in privacy so far, in the logs."""

from keras_dp.accounting.checks import checked_int
from keras_dp.callbacks.base import AccountingCallback


class EpsilonLogger(AccountingCallback):
    """Puts the privacy spent so far into the logs of every epoch, as ``logs["epsilon"]``.

        model.fit(sampler, callbacks=[keras_dp.callbacks.EpsilonLogger(sampler, delta=1e-5)])

    The progress bar and ``History`` then show it. So do ``CSVLogger``, ``TensorBoard`` and
    whatever else reads the logs, if they come *after* this callback in the list: Keras hands the
    logs down the list. At the end of training the guarantee is printed in plain words, with what
    it assumes and what it does not cover. Epsilon is that of :func:`keras_dp.compute_epsilon`, by
    RDP; neither it nor the printed text depends on the data.

    Of several workers (``MultiWorkerMirroredStrategy``) each needs the callback; the chief keeps
    the ledger and prints, and all have the same ``logs["epsilon"]``.

    The logged loss and metrics, of training and validation data alike, are *not* private, nor is
    a choice that is made by them.

    The number of updates is the DP optimizer's own ``iterations``, which the noisy update itself
    advances. So updates of earlier ``fit`` calls, of ``train_on_batch``, of a run that was
    resumed from a checkpoint, and of several batches in one execution or one update count as what
    they are. Those made outside ``fit`` are taken to have had batches of the same kind. When the
    model, or another one, is trained with another optimizer under the same callback, or the same
    ledger, all that is spent adds up. A new callback without a ledger starts anew.

    With ``ledger="checkpoints/privacy_ledger.json"`` what is spent is kept on disk, written
    before it is spent, so that a process that goes on later, whether from a checkpoint or from
    fresh weights, starts from there; see :class:`keras_dp.PrivacyLedger`.

    What the callback is told is compared with what ``fit`` is given: a sampler that is another, a
    number of examples, a ``validation_split``, a batch size or a number of batches that do not
    fit are refused before the first update. Taken on trust is what cannot be seen: how a data set
    or a generator of one's own forms its batches.

    Args:
      sampler: the :class:`keras_dp.PoissonSampler` that ``fit`` trains on. Or:
      num_examples: int >= 1, examples in the training set, with
      sampling: "poisson", "shuffle" or "full_batch", how batches are formed; see
        :func:`keras_dp.compute_epsilon`.
      delta: float in (0, 1), well below 1 / num_examples.
      ledger: :class:`keras_dp.PrivacyLedger` of the data set, or the path of one (a file, or the
        folder to keep it in). None counts what this callback sees.
      every_n_updates: int >= 1: also within epochs, whenever so many more updates were made, the
        new epsilon goes into the logs of the batches, which the progress bar shows and
        ``TensorBoard(update_freq=...)`` writes. None: at the end of epochs only.
      verbose: 0 to print nothing at the end of training, 1 to print the guarantee.

    Raises:
      ValueError: neither or both of the two ways to say where batches come from, or an argument
        outside its range.
      LedgerError: a ledger that is damaged or of other data.
      PrivacyError: when training begins, if the optimizer is not a DP optimizer, or what ``fit``
        trains on cannot be what this callback was told; at the end of an epoch, if its updates
        did not come from the sampler.
    """

    def __init__(
        self,
        sampler=None,
        *,
        num_examples=None,
        sampling=None,
        delta,
        ledger=None,
        every_n_updates=None,
        verbose=1,
    ):
        super().__init__(sampler, num_examples, sampling, delta, ledger)
        if every_n_updates is not None:
            every_n_updates = checked_int("every_n_updates", every_n_updates, 1, "Or None.")
        self._every = every_n_updates
        self.verbose = verbose

    def on_epoch_begin(self, epoch, logs=None):
        """Says what the ledger counts besides this run as it stands, if anything."""
        super().on_epoch_begin(epoch, logs)
        self._shown = None
        self._due = None if self._every is None else self._next_due()
        news = self._spending.news()
        if self._speaks and news:
            print(f"EpsilonLogger: {news}")

    def on_train_batch_end(self, batch, logs=None):
        """Writes ``logs["epsilon"]`` if epsilon is wanted within epochs."""
        super().on_train_batch_end(batch, logs)
        if self._every is None:
            return
        if self._bound >= self._due:
            self._bound = self._spending.read()
        if self._bound >= self._due:
            self._shown = self._from_chief(lambda: self.epsilon)
            self._due = self._next_due()
        if logs is not None and self._shown is not None:
            logs["epsilon"] = self._shown

    def _next_due(self):
        """The next multiple of ``every_n_updates``."""
        return (self._bound // self._every + 1) * self._every

    def on_epoch_end(self, epoch, logs=None):
        """Writes ``logs["epsilon"]``."""
        super().on_epoch_end(epoch, logs)
        if logs is not None:
            logs["epsilon"] = self.epsilon

    def on_train_end(self, logs=None):
        """Prints the guarantee."""
        if self._speaks:
            print(self._ledger.statement(self._delta))
