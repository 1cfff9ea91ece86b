"""Audited training: the real pipeline, run with known canaries in it.

The canaries are in or out, the batches are those of ``keras_dp.PoissonSampler``, the updates those
of the model's own DP optimizer, and ``fit`` makes them. Nothing here knows how any of these works.
"""

import keras
import numpy as np

from keras_dp import _keras
from keras_dp.accounting import Phase, epsilon_of_phases
from keras_dp.accounting.checks import checked_delta, checked_int
from keras_dp.auditing.canaries import Examples, WorstCase
from keras_dp.optimizers.base import private_optimizer
from keras_dp.sampling import PoissonSampler

ADVERSARIES = ("white_box", "black_box")


class Trainings:
    """Trains a model as often as wanted, each time from the same weights.

    Args:
      model: a compiled model with a DP optimizer. Its settings are used, in an optimizer of the
        audit's own; its weights end as they began.
      x, y: the user's examples, arrays or structures of arrays.
      canaries: int, the number of worst-case canaries; or a pair (x, y) of examples.
      adversary: "white_box" or "black_box".
      steps: int >= 1, updates of one training.
      delta: float in (0, 1).
      accountant: "pld" or "rdp", by which the claim is computed.

    Attributes:
      phase: the :class:`~keras_dp.accounting.Phase` of one training.
      claimed_epsilon: float, what the accountant says of it.
      number: int, canaries.
    """

    def __init__(self, model, x, y, *, canaries, adversary, steps, delta, accountant):
        optimizer = private_optimizer(model)
        if optimizer is None:
            raise ValueError(
                "An audit compares a training with its claim, so the model must be compiled with "
                "a DP optimizer of keras_dp; received "
                f"{type(_keras.compiled_optimizer(model)).__name__}."
            )
        _refuse_units(optimizer)
        if adversary not in ADVERSARIES:
            raise ValueError(f"adversary must be one of {ADVERSARIES}; received {adversary!r}.")
        if not model.built:
            raise ValueError(
                f"Model '{model.name}' has no weights yet. Call it on a batch before the audit."
            )
        if model.steps_per_execution != 1:
            raise ValueError(
                "Audits look at the model after every update; it was compiled with "
                f"steps_per_execution={model.steps_per_execution}. Compile with 1."
            )
        steps = checked_int("steps", steps, 1, "It is the number of updates of one training.")
        delta = checked_delta(delta)
        if isinstance(canaries, (int, np.integer)):
            number = checked_int("canaries", canaries, 1, "Pass some hundred, or examples.")
            self._canaries = WorstCase(model, x, y, number, adversary == "white_box")
        else:
            self._canaries = Examples(model, x, y, canaries, adversary == "white_box")
        self.number = self._canaries.number
        size = len(keras.tree.flatten(self._canaries.x)[0])
        self.phase = Phase(
            num_examples=size,
            batch_size=optimizer.batch_size,
            noise_multiplier=optimizer.noise_multiplier,
            steps=steps,
            sampling="full_batch" if optimizer.batch_size == size else "poisson",
            neighboring_relation="zero_out",
        )
        self.claimed_epsilon = epsilon_of_phases([self.phase], delta, accountant)
        self._model = self._canaries.model
        self._optimizer = private_optimizer(self._model)
        if not self._optimizer.built:
            self._optimizer.build(self._model.trainable_variables)

    def run(self, included, runs=1, progress=None):
        """Trains with these canaries.

        Args:
          included: bool array ``[canaries]``.
          runs: int >= 1, independent trainings; each begins from the same weights.
          progress: None, or a function of the number of trainings done that is called after each.

        Returns:
          Float array ``[runs, canaries]`` of scores, larger where a canary seems to be in.
        """
        sampler = PoissonSampler(
            self._canaries.x,
            self._canaries.y,
            self._canaries.sample_weights(included),
            batch_size=self._optimizer.batch_size,
            steps_per_epoch=runs * self.phase.steps,
        )
        state = [*self._model.trainable_variables, *self._optimizer.variables]
        start = _Snapshot(state)
        trainings = _OneAfterTheOther(self._canaries, start, self.phase.steps, progress)
        try:
            # One epoch of all: to begin an epoch takes Keras longer than these trainings.
            self._model.fit(sampler, verbose=0, callbacks=[trainings])
        finally:
            start.restore()
        return np.stack(trainings.scores)


class _Snapshot:
    """The values of variables, to go back to."""

    def __init__(self, variables):
        self._values = [(variable, variable.numpy()) for variable in variables]

    def restore(self):
        """Sets every variable back."""
        for variable, value in self._values:
            variable.assign(value)


class _OneAfterTheOther(keras.callbacks.Callback):
    """Makes trainings of ``steps`` updates: each from the same start, and scored at its end.

    Random states go on, so that trainings have nothing in common.
    """

    def __init__(self, canaries, start, steps, progress):
        super().__init__()
        self._canaries, self._start, self._progress = canaries, start, progress
        self._steps, self.scores = steps, []

    def on_train_batch_begin(self, batch, logs=None):
        if batch % self._steps == 0:
            self._start.restore()
            self._canaries.begin()

    def on_train_batch_end(self, batch, logs=None):
        self._canaries.after_update()
        if (batch + 1) % self._steps == 0:
            self.scores.append(self._canaries.scores())
            if self._progress is not None:
                self._progress(len(self.scores))


def _refuse_units(optimizer):
    for name in ("examples_per_user", "gradient_accumulation_steps"):
        if getattr(optimizer, name) is not None:
            raise ValueError(
                f"Audits train on one example for each row and one batch for each update; the "
                f"optimizer has {name}={getattr(optimizer, name)}. Compile without it: neither "
                "clip nor noise depend on it."
            )
