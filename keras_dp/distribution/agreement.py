"""What several workers must have in common before they train together.

Each runs the same program, and each of them could be told something else. Then one waits for an
update that the others do not make; or, worse, all go on, and what is accounted is what one of them
does. So settings are compared when training begins, on all workers, and all refuse together.

The state to begin with is the chief's: weights, the variables of the optimizer, the run, the
epoch. So it is enough that the chief restores a checkpoint, and workers whose weights differ in the
last digit because each computed them for itself become equal.
"""

import contextlib
import hashlib

import keras
import numpy as np

from keras_dp import _keras
from keras_dp.distribution import cluster
from keras_dp.errors import PrivacyError


@contextlib.contextmanager
def required(model, fit):
    """While open, what ``fit`` should get as its callbacks, so that the workers agree.

    Args:
      model: ``keras.Model`` with a DP optimizer.
      fit: ``FitCall``.
    """
    callbacks, strategy = fit.callbacks, _keras.own_strategy(model)
    if cluster.workers_of(strategy) == 1:
        yield callbacks
        return
    agreement = Agreement(strategy, fit)
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        yield [*keras.tree.flatten(callbacks or []), agreement]
        return
    agreement.set_model(model)
    callbacks.append(agreement)
    try:
        yield callbacks
    finally:
        callbacks.callbacks.remove(agreement)


class Agreement(keras.callbacks.Callback):
    """Has all workers begin from one state, with the same settings, and end together.

    Comes after all other callbacks: what they restore, and their wish to stop, count.
    """

    def __init__(self, strategy, fit):
        super().__init__()
        self._strategy, self._fit = strategy, fit

    def on_train_begin(self, logs=None):
        """Compares settings; takes over the chief's state."""
        others = [c for c in _flat(self._fit.callbacks) if getattr(c, "on_every_worker", False)]
        self._require_equal(self._settings(others))
        self._take_over_state()
        self._require_equal({"the noise": self._optimizer.noise_fingerprint}, shown=False)

    def on_epoch_end(self, epoch, logs=None):
        """If one stops, all do."""
        if cluster.total(self._strategy, [int(bool(self.model.stop_training))])[0]:
            self.model.stop_training = True

    @property
    def _optimizer(self):
        return _keras.compiled_optimizer(self.model)

    def _settings(self, accounting):
        fit = self._fit
        validation = None
        if fit.validation_data is not None:
            validation = fit.validation_steps, fit.validation_freq, fit.validation_batch_size
        return {
            "epochs": fit.epochs,
            "steps_per_epoch": fit.steps_per_epoch,
            "validation": validation,
            "steps_per_execution": self.model.steps_per_execution,
            "the optimizer": self._optimizer,
            "the data": fit.x if hasattr(fit.x, "sampling") else type(fit.x).__name__,
            "the callbacks that account": [repr(callback) for callback in accounting],
        }

    def _require_equal(self, settings, shown=True):
        mine = {name: str(value) for name, value in settings.items()}
        chiefs = cluster.from_chief(self._strategy, lambda: mine)
        differs = cluster.total(self._strategy, [mine[name] != chiefs[name] for name in mine])
        for name, workers in zip(mine, differs):
            if workers:
                values = f": {chiefs[name]} on the chief, {mine[name]} here" if shown else ""
                raise PrivacyError(
                    f"Of {cluster.workers_of(self._strategy)} workers that train together, "
                    f"{workers} were told something else than the chief. What differs: {name}"
                    f"{values}. Run the same program with the same arguments on all; what only "
                    "one may do, such as writing files, goes behind "
                    "keras_dp.distribution.is_chief(strategy)."
                )

    def _take_over_state(self):
        begin = cluster.from_chief(self._strategy, lambda: _keras.restored_epoch(self.model))
        _keras.set_restored_epoch(self.model, begin)
        state = [*self.model.weights, *self.model.optimizer.variables, self._optimizer.run]
        mine = _digest(state)
        chiefs = cluster.from_chief(self._strategy, lambda: mine)
        if not cluster.total(self._strategy, [mine != chiefs])[0]:
            return
        for variable in state:
            value = variable.numpy()
            data = cluster.bytes_from_chief(self._strategy, value.tobytes())
            if cluster.worker_number(self._strategy):
                variable.assign(np.frombuffer(data, value.dtype).reshape(value.shape))


def _flat(callbacks):
    return getattr(callbacks, "callbacks", None) or keras.tree.flatten(callbacks or [])


def _digest(variables):
    digest = hashlib.blake2b()
    for variable in variables:
        digest.update(variable.numpy().tobytes())
    return digest.hexdigest()
