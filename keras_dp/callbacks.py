"""Keras callbacks that show what training costs in privacy."""

import keras

from keras_dp import accounting
from keras_dp.errors import PrivacyError
from keras_dp.optimizers.base import private_optimizer


class EpsilonLogger(keras.callbacks.Callback):
    """Puts the privacy spent so far into the logs of every epoch, as ``logs["epsilon"]``.

        model.fit(sampler, callbacks=[keras_dp.callbacks.EpsilonLogger(sampler, delta=1e-5)])

    The progress bar and ``History`` then show it. So do ``CSVLogger``, ``TensorBoard`` and
    whatever else reads the logs, if they come *after* this callback in the list: Keras hands the
    logs down the list. At the end of training the guarantee is printed in plain words, with what
    it assumes and what it does not cover. Epsilon is that of :func:`keras_dp.compute_epsilon`, by
    RDP; neither it nor the printed text depends on the data.

    The logged loss and metrics, of training and validation data alike, are *not* private, nor is
    a choice that is made by them.

    The number of updates is the DP optimizer's own ``iterations``, which the noisy update itself
    advances. So updates of earlier ``fit`` calls, of ``train_on_batch`` and of a run that was
    resumed from a checkpoint count. Those made outside ``fit`` are taken to have had batches of
    the same kind.

    Args:
      sampler: the :class:`keras_dp.PoissonSampler` that ``fit`` trains on. Each epoch is checked
        to have used its batches (not if they are drawn in other processes). Or:
      num_examples: int >= 1, examples in the training set, with
      sampling: "poisson", "shuffle" or "full_batch", how batches are formed; see
        :func:`keras_dp.compute_epsilon`. Nobody checks that it is true.
      delta: float in (0, 1), well below 1 / num_examples.
      verbose: 0 to print nothing at the end of training, 1 to print the guarantee.

    Raises:
      ValueError: neither or both of the two ways to say where batches come from, or an argument
        outside its range.
      PrivacyError: when training begins, if the optimizer is not a DP optimizer, or its batch
        size is not the sampler's; at the end of an epoch, if its updates did not come from the
        sampler.
    """

    def __init__(self, sampler=None, *, num_examples=None, sampling=None, delta, verbose=1):
        super().__init__()
        self._sampler = sampler
        if sampler is not None:
            if num_examples is not None or sampling is not None:
                raise ValueError(
                    f"EpsilonLogger received a sampler and also num_examples={num_examples!r}, "
                    f"sampling={sampling!r}. The sampler knows both: leave them out."
                )
            missing = [a for a in _SAMPLER_ATTRIBUTES if not hasattr(sampler, a)]
            if missing:
                raise ValueError(
                    f"sampler must be a keras_dp.PoissonSampler; received "
                    f"{type(sampler).__name__}, without {', '.join(missing)}. For other data pass "
                    "num_examples= and sampling=."
                )
            num_examples, sampling = sampler.num_examples, sampler.sampling
        elif num_examples is None or sampling is None:
            raise ValueError(
                f"EpsilonLogger received num_examples={num_examples!r} and sampling={sampling!r}, "
                "but has to know where batches come from. Either pass the "
                "keras_dp.PoissonSampler that fit trains on: EpsilonLogger(sampler, delta=...). Or "
                'pass num_examples= and sampling=: "shuffle" for fixed batches of a shuffled '
                'data set, which is what fit does with arrays; "poisson" only if every batch '
                'draws each example independently; "full_batch" if each is the whole data set.'
            )
        self._num_examples, self._sampling, self._delta = num_examples, sampling, delta
        self._curve_for(batch_size=num_examples, noise_multiplier=1.0)  # bad settings fail here
        self.verbose = verbose
        self._trained_model = None

    @property
    def steps(self):
        """int, the updates made so far: the DP optimizer's ``iterations``."""
        return 0 if self._trained_model is None else _iterations(self._optimizer)

    @property
    def epsilon(self):
        """float, the epsilon of all updates made so far; 0.0 before the first."""
        if self._trained_model is None:
            return 0.0
        return self._curve.epsilon(*self._spent())

    def on_train_begin(self, logs=None):
        """Checks that there is something to account for."""
        optimizer = private_optimizer(self.model)
        if optimizer is None:
            raise PrivacyError(
                "EpsilonLogger needs a model that was compiled with a DP optimizer; received "
                f"{type(self.model.optimizer).__name__}, under which training is not private. "
                "Compile with keras_dp.DPSGD, keras_dp.DPAdam or any optimizer of "
                "keras_dp.make_private, or take the callback out."
            )
        sampler = self._sampler
        if sampler is not None and sampler.batch_size != optimizer.batch_size:
            raise PrivacyError(
                f"The sampler draws {sampler.batch_size} examples on average, but the optimizer's "
                f"batch_size is {optimizer.batch_size}: it would divide by one number what was "
                "drawn, and accounted, by the other. Give both the same batch_size."
            )
        if self.model is not self._trained_model:
            self._trained_model = self.model
            self._steps_closed = self._epochs_closed = 0
        elif optimizer is not self._optimizer and self._steps_closed > 0:
            raise PrivacyError(
                f"The model was trained for {self._steps_closed} updates by an optimizer that "
                "another one has replaced since. What both spend adds up, but this callback reads "
                "the updates of one. Keep the optimizer (assign its learning_rate, say), or make "
                "a new EpsilonLogger and state that it leaves the earlier updates out."
            )
        self._optimizer = optimizer
        self._curve = self._curve_for(optimizer.batch_size, optimizer.noise_multiplier)
        self._curve.warn()
        self._steps_before_fit = None
        if sampler is not None:
            self._drawn_before_fit = sampler.batches_drawn

    def on_epoch_begin(self, epoch, logs=None):
        """Counts what was done outside ``fit``, and what a checkpoint has brought back."""
        self._close_epoch()
        if self._steps_before_fit is None:
            self._steps_before_fit = self._steps_closed

    def on_epoch_end(self, epoch, logs=None):
        """Writes ``logs["epsilon"]``."""
        self._close_epoch()
        self._check_source()
        if logs is not None:
            logs["epsilon"] = self.epsilon

    def on_train_end(self, logs=None):
        """Prints the guarantee."""
        if self.verbose:
            print(accounting.statement(self._curve, *self._spent()))

    def _curve_for(self, batch_size, noise_multiplier):
        return accounting.EpsilonCurve(
            self._num_examples, batch_size, noise_multiplier, self._delta, self._sampling
        )

    def _spent(self):
        """Updates so far, and the passes over shuffled data that were begun for them.

        Keras shuffles anew for each of its epochs: an example may take part in the last update
        before and in the first one after. So updates of different epochs share no pass.
        """
        steps = _iterations(self._optimizer)
        if steps < self._steps_closed:
            raise PrivacyError(
                f"The optimizer's iterations went back from {self._steps_closed} to {steps}, but "
                "what those updates spent is not given back. Do not assign to iterations, or make "
                "a new EpsilonLogger and state which updates it leaves out."
            )
        begun = -(-(steps - self._steps_closed) // self._curve.steps_per_epoch)
        return steps, self._epochs_closed + begun

    def _close_epoch(self):
        self._steps_closed, self._epochs_closed = self._spent()

    def _check_source(self):
        """Refuses to account for batches that the sampler did not draw."""
        if self._sampler is None or self._sampler.use_multiprocessing:
            return
        updates = self._steps_closed - self._steps_before_fit
        drawn = self._sampler.batches_drawn - self._drawn_before_fit
        if drawn < updates:
            raise PrivacyError(
                f"This fit made {updates} updates, but the sampler handed out {drawn} batches: the "
                "others came from elsewhere, and amplification by Poisson sampling is not proved "
                "for them. Train on the sampler itself, model.fit(sampler, ...), or account for "
                'what you train on, such as EpsilonLogger(num_examples=..., sampling="shuffle", '
                "delta=...)."
            )


_SAMPLER_ATTRIBUTES = (
    "num_examples",
    "batch_size",
    "sampling",
    "batches_drawn",
    "use_multiprocessing",
)


def _iterations(optimizer):
    return int(optimizer.iterations.numpy())
