"""``PrivacyBudget``: training ends before it costs more than was allowed."""

import math

from keras_dp.accounting import epsilon_of_phases
from keras_dp.accounting.checks import checked_number
from keras_dp.callbacks.base import AccountingCallback
from keras_dp.errors import BudgetExceededError, PrivacyError


class PrivacyBudget(AccountingCallback):
    """Stops training before the update that would take epsilon above ``max_epsilon``.

        budget = keras_dp.callbacks.PrivacyBudget(sampler, delta=1e-5, max_epsilon=3.0)
        model.fit(sampler, epochs=1000, callbacks=[budget])

    Training ends in the middle of an epoch if need be, as after the last epoch: ``fit`` returns,
    and the model can be used and saved. Keras makes ``steps_per_execution`` updates at a time; if
    fewer are left, none of them is made. A ``fit`` that could make no update at all raises, and so
    does ``model.train_on_batch`` if the last ``fit`` of the model had this callback. When to stop
    depends on public numbers only.

    Of several workers each needs the callback; the chief decides, by its ledger, and all stop
    before the same update.

    With a ``ledger``, earlier trainings on the same data count, and so do others that run at the
    same time: what they have reserved is not there to be spent.

    Args:
      sampler, num_examples, sampling, delta, ledger: as for :class:`EpsilonLogger`, with which it
        may share a ledger.
      max_epsilon: float > 0, the most that may be spent, by RDP.
      verbose: 1 to print a line when training is stopped, 0 not to.

    Raises:
      ValueError: an argument outside its range.
      LedgerError: a ledger that is damaged or of other data.
      BudgetExceededError: when training begins, if not even its first execution may be made.
      PrivacyError: as :class:`EpsilonLogger`.
    """

    def __init__(
        self,
        sampler=None,
        *,
        num_examples=None,
        sampling=None,
        delta,
        max_epsilon,
        ledger=None,
        verbose=1,
    ):
        super().__init__(sampler, num_examples, sampling, delta, ledger)
        self.max_epsilon = checked_number(
            "max_epsilon",
            max_epsilon,
            lambda value: 0 < value < math.inf,
            "a finite number above 0",
            "Pass the largest epsilon that you accept, for example 3.0.",
        )
        self._within = self._allows
        self.verbose = verbose

    def _allows(self, phases):
        return epsilon_of_phases(phases, self._delta) <= self.max_epsilon

    def updates_left(self, optimizer=None):
        """How many more updates the budget allows.

        Args:
          optimizer: the DP optimizer that is to make them; by default that of the model which was
            trained last.

        Returns:
          int >= 0. Updates that the ledger does not know yet, but that ``optimizer`` has made,
          count as spent. For shuffled batches: as many as whole passes over the data allow.
        """
        optimizer = self._optimizer if optimizer is None else optimizer
        if optimizer is None:
            raise ValueError(
                "updates_left has no optimizer yet: train with this callback first, or pass the "
                "optimizer: budget.updates_left(model.optimizer)."
            )
        if not self._is_chief:
            raise PrivacyError(
                "updates_left was called on a worker that does not keep the ledger. Ask on the "
                "chief: if keras_dp.distribution.is_chief(strategy)."
            )
        return self._own_spending(optimizer).updates_left(self._allows)

    def on_epoch_begin(self, epoch, logs=None):
        """Refuses to begin what the budget does not allow."""
        super().on_epoch_begin(epoch, logs)
        self._require_room(self._updates_after(-1))

    def on_train_batch_end(self, batch, logs=None):
        """Stops if the next execution would spend too much."""
        super().on_train_batch_end(batch, logs)
        if not self._prepared:
            self._stop()

    def on_epoch_end(self, epoch, logs=None):
        """Stops if the next epoch could not even begin."""
        super().on_epoch_end(epoch, logs)
        n, last = self._updates_after(-1), epoch + 1 >= self.params.get("epochs", epoch + 1)
        if not last and self._spending.updates_left(self._allows, n) < n:
            self._stop()

    def before_train_on_batch(self, model):
        """Refuses the update if it would spend too much."""
        super().before_train_on_batch(model)
        self._require_room(1)

    def __repr__(self):
        return f"{super().__repr__()[:-1]}, max_epsilon={self.max_epsilon:g}>"

    def _require_room(self, at_once):
        if self._prepared:
            return
        left = self._spending.updates_left(self._allows)
        if left == 0:
            what = "no update is left"
            way_out = "Raise max_epsilon if that is defensible, or train on other data."
        else:
            what = f"{left} updates are left, but {at_once} would be made at once"
            way_out = "Compile with a smaller steps_per_execution to make them."
        raise BudgetExceededError(
            f"Epsilon is {self.epsilon:.6g} at delta = {self._delta:g} after {self.steps} updates, "
            f"and max_epsilon is {self.max_epsilon:g}: {what}. {way_out}"
        )

    def _stop(self):
        if self.model.stop_training:
            return
        self.model.stop_training = True
        if self._speaks:
            new_line = "\n" if self.params.get("verbose") in (1, "auto") else ""  # after the bar
            print(
                f"{new_line}PrivacyBudget: training stopped after {self.steps} updates at epsilon "
                f"= {self.epsilon:.6g} (delta = {self._delta:g}); going on would exceed "
                f"max_epsilon = {self.max_epsilon:g}."
            )
