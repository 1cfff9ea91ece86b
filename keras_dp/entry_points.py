"""What the user gave to ``fit``, and who wants to know before ``train_on_batch`` updates.

Keras tells callbacks the model and the number of batches, not the data. What accounts for
privacy has to see the data: batches of a shuffled array are not Poisson draws, and an array of
1,000 rows is not the data set of 10,000 that somebody wrote into an argument. Nor does Keras
call anybody before ``train_on_batch``. So importing keras_dp wraps these two public methods of
the trainer. The wrappers note and ask, and change no result. Under a strategy of several devices
they change arguments: each worker trains on its share of the data, and the workers compare what
they are about to do. One mistake that would leave somebody unprotected shows in the arguments
alone, and is refused here: batches of users that the optimizer would clip row by row.
"""

import contextlib
import functools
import inspect
import weakref

from keras_dp import _keras
from keras_dp.distribution import agreement, data
from keras_dp.errors import PrivacyError
from keras_dp.optimizers.base import private_optimizer
from keras_dp.sampling import PoissonSampler
from keras_dp.sampling.users import require_same_users

_fits = weakref.WeakKeyDictionary()


class FitCall:
    """The arguments of one ``fit``, by name, with Keras's defaults for those left out.

    Attributes:
      arguments: dict; see ``keras.Model.fit``.
    """

    def __init__(self, plain, model, args, kwargs):
        bound = inspect.signature(plain).bind(model, *args, **kwargs)
        bound.apply_defaults()
        self.arguments = dict(list(bound.arguments.items())[1:])

    def but(self, **others):
        """The same arguments with others in the place of some."""
        return self.arguments | others

    def __getattr__(self, name):
        try:
            return self.arguments[name]
        except KeyError:
            raise AttributeError(name) from None


def current_fit(model):
    """The ``fit`` that ``model`` is in.

    Args:
      model: ``keras.Model``.

    Returns:
      :class:`FitCall`, or None if the model is in no fit, or in one of its own class's making.
    """
    return _fits.get(model)


def ask_before_train_on_batch(model, callback):
    """Has ``callback.before_train_on_batch(model)`` called before each ``model.train_on_batch``.

    Until the next ``fit`` of the model begins, which may bring other callbacks. What it raises
    keeps the update from happening.

    Args:
      model: ``keras.Model``.
      callback: object with that method.
    """
    _asked(model).append(callback)


def _asked(model):
    # On the model, so that both can be freed together; past Keras's tracking of attributes.
    if _ASKED not in model.__dict__:
        object.__setattr__(model, _ASKED, [])
    return model.__dict__[_ASKED]


_ASKED = "_keras_dp_before_train_on_batch"


@contextlib.contextmanager
def _inside_fit(model, fit):
    before = _fits.get(model)
    _fits[model] = fit
    try:
        yield
    finally:
        if before is None:
            _fits.pop(model, None)
        else:
            _fits[model] = before


def _begin_logical_batch(model, optimizer):
    """What an earlier training left unfinished gets into no update of this one."""
    if model in _fits and (optimizer.gradient_accumulation_steps or 1) > 1:
        raise PrivacyError(
            "fit was called within a fit of the same model, whose optimizer adds up batches "
            f"(gradient_accumulation_steps={optimizer.gradient_accumulation_steps}): the two would "
            "share an update. Call it after the other fit has returned."
        )
    optimizer.begin_logical_batch()


def install():
    """Wraps ``fit`` and ``train_on_batch`` of Keras's TensorFlow trainer. Idempotent."""
    trainer = _keras.TensorFlowTrainer
    if getattr(trainer.fit, "keras_dp", False):
        return
    plain_fit, plain_train_on_batch = trainer.fit, trainer.train_on_batch

    @functools.wraps(plain_fit)
    def fit(self, *args, **kwargs):
        _asked(self).clear()
        call, optimizer = FitCall(plain_fit, self, args, kwargs), private_optimizer(self)
        if optimizer is not None and isinstance(call.x, PoissonSampler):
            require_same_users(call.x, optimizer)
        if optimizer is None:
            with _inside_fit(self, call):
                return plain_fit(self, *args, **kwargs)
        _begin_logical_batch(self, optimizer)
        with (
            _inside_fit(self, call),
            data.delivered(self, call.x) as x,
            agreement.required(self, call) as callbacks,
        ):
            shuffle = call.shuffle and x is call.x  # a worker's share is in order as it is
            return plain_fit(self, **call.but(x=x, callbacks=callbacks, shuffle=shuffle))

    @functools.wraps(plain_train_on_batch)
    def train_on_batch(self, *args, **kwargs):
        if private_optimizer(self) is not None:
            data.refuse_train_on_batch(self)
        for callback in _asked(self):
            callback.before_train_on_batch(self)
        return plain_train_on_batch(self, *args, **kwargs)

    fit.keras_dp = train_on_batch.keras_dp = True
    trainer.fit, trainer.train_on_batch = fit, train_on_batch
