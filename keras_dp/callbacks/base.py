"""What callbacks that account for a training have in common."""

import math

import keras

from keras_dp import _keras, entry_points
from keras_dp.accounting import advice
from keras_dp.accounting.checks import checked_delta
from keras_dp.accounting.ledger import PrivacyLedger
from keras_dp.callbacks.accumulated import accumulation
from keras_dp.callbacks.shared import SharedSpending
from keras_dp.callbacks.source import DRAWS, Source
from keras_dp.callbacks.spending import current_spending, spending
from keras_dp.distribution import cluster
from keras_dp.errors import PrivacyError
from keras_dp.optimizers.base import private_optimizer


class AccountingCallback(keras.callbacks.Callback):
    """Has the ledger count the updates of a ``fit`` before they are made.

    Keras calls the hooks once for each execution of up to ``steps_per_execution`` batches. From
    that follows only how many updates there *may* have been (``_bound``); how many there were is
    read from the optimizer, whenever more than what is reserved might be made next.

    Of several workers, each has the callback, and the chief alone has the ledger; see
    :mod:`keras_dp.callbacks.shared`. The others get its entries at the end of each epoch.

    Args:
      sampler, num_examples, sampling, delta, ledger: see :class:`EpsilonLogger`.
    """

    on_every_worker = True  # which keras_dp.distribution makes sure of

    def __init__(self, sampler, num_examples, sampling, delta, ledger):
        super().__init__()
        self._source = Source(type(self).__name__, sampler, num_examples, sampling)
        self._source.check_settings()
        self._delta = checked_delta(delta)
        self._ledger = self._given_ledger = self._opened(ledger)
        self._copy_of_ledger = None
        self._strategy = None
        self._optimizer = self._spending = self._examples_seen = self._layout = None
        self._within = None  # what may be spent: a function of phases, or no limit

    def _opened(self, ledger):
        if isinstance(ledger, PrivacyLedger):
            return ledger
        return PrivacyLedger(ledger, num_examples=self._source.num_examples)

    @property
    def ledger(self):
        """The :class:`keras_dp.PrivacyLedger` that counts what is spent."""
        return self._ledger

    @property
    def epsilon(self):
        """float, the epsilon of all that the ledger holds, up to now; 0.0 before any update."""
        return self._ledger.epsilon(self._delta)

    @property
    def steps(self):
        """int, the updates that :attr:`epsilon` counts."""
        return self._ledger.steps

    def on_train_begin(self, logs=None):
        """Checks that optimizer and data are such as can be accounted for."""
        optimizer = private_optimizer(self.model)
        name = type(self).__name__
        if optimizer is None:
            raise PrivacyError(
                f"{name} needs a model that was compiled with a DP optimizer; received "
                f"{type(self.model.optimizer).__name__}, under which training is not private. "
                "Compile with keras_dp.DPSGD, keras_dp.DPAdam or any optimizer of "
                "keras_dp.make_private, or take the callback out."
            )
        self._strategy = _keras.own_strategy(self.model)
        self._ledger = self._ledger_of_worker()
        self._fit = entry_points.current_fit(self.model)
        self._source.check(optimizer, self._fit, cluster.workers_of(self._strategy))
        if self._fit is None:
            optimizer.begin_logical_batch()
        self._layout, self._ended_early = self._layout_of(optimizer), False
        self._layout.check()
        advice.warn_about_settings([self._source.phase(optimizer)], self._delta)
        if optimizer is not self._optimizer and self._spending and not self._spending.closed:
            self._spending.end_epoch()
        self._optimizer, self._made_before_fit = optimizer, None
        earlier = current_spending(self._ledger, optimizer)
        if earlier is not None:
            earlier.end_epoch()  # if an error ended it
        self._drawn_before_fit = self._source.updates_drawn
        entry_points.ask_before_train_on_batch(self.model, self)

    def on_epoch_begin(self, epoch, logs=None):
        """Counts what was done outside ``fit``, and what a checkpoint has brought back."""
        self._last_batch, self._examples_seen = -1, None
        if self._ended_early:
            self._layout.cut()
        self._follow(self._optimizer)
        self._spending.begin_epoch()
        self._share_ledger()
        self._bound = self._spending.read()
        if self._made_before_fit is None:
            self._made_before_fit = self._bound
        self._made_before_epoch = self._bound
        self._prepare(self._updates_after(-1))

    def on_train_batch_begin(self, batch, logs=None):
        """Reserves what no epoch should have, but a loop of one's own might: more batches."""
        if self._batches and batch >= self._batches:
            self._prepare(self._updates_after(-1))

    def on_train_batch_end(self, batch, logs=None):
        """Reserves the updates of the next execution, if the epoch has one."""
        self._last_batch = batch
        self._bound += self._coming
        more = self._updates_after(batch)
        if more:
            self._prepare(more)

    def on_epoch_end(self, epoch, logs=None):
        """Sets the ledger to what was made, and refuses batches from elsewhere."""
        self._from_chief(self._spending.end_epoch)
        self._share_ledger()
        updates = self._spending.made - self._made_before_epoch
        self._ended_early |= not self._layout.ended(self._last_batch + 1, updates)
        self._check_draws()
        self._check_batches(updates)
        self._check_examples()

    def on_test_begin(self, logs=None):
        """Keras begins anew to count examples when it validates."""
        if self._optimizer is not None and self._examples_seen is None:
            self._examples_seen = _keras.examples_tracked(self.model)

    def before_train_on_batch(self, model):
        """Reserves one update; called before ``model.train_on_batch``."""
        optimizer = private_optimizer(model)
        if optimizer is not None:
            _require_no_accumulation(optimizer)
            self._follow(optimizer)
            self._bound = self._spending.read()
            self._prepare(1)

    @property
    def _batches(self):
        """int, batches in an epoch of the present ``fit``; None if not known."""
        return (self.params or {}).get("steps")

    def _updates_after(self, batch):
        """int, the most updates that the execution after ``batch`` can make; -1 for the first."""
        left = max(self._batches - batch - 1, 0) if self._batches else math.inf
        batches = min(self.model.steps_per_execution, left)
        return -(-batches // accumulation(self._optimizer))

    def _follow(self, optimizer):
        """Looks for, or starts, the spending of an optimizer on the ledger."""
        phase, _ = self._counted(optimizer)
        if cluster.workers_of(self._strategy) == 1:
            self._spending = self._own_spending(optimizer)
        else:
            self._spending = SharedSpending(
                self._strategy, optimizer, phase, lambda: self._own_spending(optimizer)
            )

    def _own_spending(self, optimizer):
        """The spending of an optimizer, in the ledger that this process keeps."""
        return spending(self._ledger, optimizer, *self._counted(optimizer))

    def _counted(self, optimizer):
        layout = self._layout if optimizer is self._optimizer else self._layout_of(optimizer)
        phase = self._source.phase(optimizer, participations=layout.participations)
        return phase, layout.passes

    def _ledger_of_worker(self):
        """The ledger that was given; in its place one in memory on workers that keep no file."""
        given = self._given_ledger
        if given.path is None or self._is_chief:
            return given
        if self._copy_of_ledger is None:
            self._copy_of_ledger = PrivacyLedger(
                num_examples=given.num_examples, name=given.name, fingerprint=given.fingerprint
            )
        return self._copy_of_ledger

    def _share_ledger(self):
        """Gives the other workers the entries of the chief's ledger."""
        if cluster.workers_of(self._strategy) == 1:
            return
        entries = self._from_chief(self._ledger.to_json)
        if not self._is_chief:
            self._ledger.merge(PrivacyLedger.from_json(entries))

    def _from_chief(self, make):
        """What ``make`` gives, of several workers on the chief."""
        return cluster.from_chief(self._strategy, make)

    @property
    def _speaks(self):
        """Whether this process prints: of several workers the chief."""
        return self.verbose and self._is_chief

    @property
    def _is_chief(self):
        return cluster.worker_number(self._strategy) == 0

    def __repr__(self):
        return f"<{type(self).__name__} of {self._source!r}, delta={self._delta:g}>"

    def _layout_of(self, optimizer):
        return self._source.layout(optimizer, getattr(self, "_fit", None), self._batches)

    def _prepare(self, updates):
        """Has so many more counted, if they may be spent: ``_prepared`` says whether."""
        if self._bound + updates > self._spending.reserved(self._within):
            self._bound = self._spending.read()
        self._prepared = self._spending.reserve(self._bound + updates, self._within)
        self._coming = updates

    def _check_draws(self):
        """Refuses to account for batches that the sampler did not draw."""
        source = self._source
        if source.updates_drawn is None:
            return
        updates = self._spending.made - self._made_before_fit
        drawn = source.updates_drawn - self._drawn_before_fit
        if drawn < updates:
            raise PrivacyError(
                f"This fit made {updates} updates, but the sampler handed out {drawn} batches: the "
                "others came from elsewhere, and amplification by Poisson sampling is not proved "
                "for them. Train on the sampler itself, model.fit(sampler, ...), or account for "
                'what you train on, such as EpsilonLogger(num_examples=..., sampling="shuffle", '
                "delta=...)."
            )

    def _check_batches(self, updates):
        """Refuses several updates on one draw, also of draws that nobody here can count."""
        source, most = self._source, self._last_batch + self.model.steps_per_execution
        if source.sampling in DRAWS and updates > most:
            raise PrivacyError(
                f"This epoch made {updates} updates of {self._last_batch + 1} batches, but each "
                f"update has to have a draw of its own with sampling={source.sampling!r}. Make one "
                "update in train_step, on each batch that it gets, and none elsewhere."
            )

    def _check_examples(self):
        """Refuses passes over more examples than there are: then some were in it twice."""
        source, seen = self._source, self._examples_seen
        if source.sampling != "shuffle" or source.sampler is not None:
            return
        seen = _keras.examples_tracked(self.model) if seen is None else seen
        updates = self._spending.made - self._made_before_epoch
        passes = max(-(-updates // self._spending.phase.steps_per_epoch), 1)
        copies = getattr(self._optimizer, "augmentations", None) or 1
        if seen > passes * copies * source.num_examples:
            raise PrivacyError(
                f"This epoch trained on {seen} examples in {updates} updates, which were counted "
                f"as {passes} passes over {source.num_examples} examples. So the batches are "
                "larger than the optimizer's batch_size, or num_examples is too small. Make them "
                "what the data really has."
            )


def _require_no_accumulation(optimizer):
    """Nobody knows which passes the batches of ``train_on_batch`` are from, nor which epoch."""
    parts = accumulation(optimizer)
    if parts > 1:
        raise PrivacyError(
            f"train_on_batch with gradient_accumulation_steps={parts} cannot be accounted for: "
            "which passes over the data the batches of an update come from is not known, so an "
            "example may be in it several times. Train with fit, or give train_on_batch whole "
            "batches and the optimizer microbatch_size in place of gradient_accumulation_steps."
        )
