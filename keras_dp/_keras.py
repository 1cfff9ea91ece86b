"""Everything of Keras that is not public and that keras_dp leans on, in one place.

Written against Keras 3.12 to 3.15; ``tests/test_keras_private.py`` tells when one of
these names changes. Why each is needed:

``TensorFlowTrainer``         its ``train_step`` is where a private step has to begin:
                              later, only the gradient of the batch mean is left. Its ``fit``
                              and ``train_on_batch`` are public methods of every model.
``Layer._flatten_layers``     to reach every nested layer.
``Layer._trainable_variables``  the weights a layer owns itself, without its children's.
``Layer._seed_generators``    the one state besides metrics that a private step advances.
``Functional``                the class of models made of a graph of layers; and
``Operation._inbound_nodes``  with what a part of the graph is called;
``_keras_history``            and which operation made a tensor of it.
``_keras_mask``               a mask travels as an attribute of a tensor; slices lose it.
``Layer._call_has_mask_arg``, ``_call_has_training_arg``  what a wrapper may hand on.
``Model._compute_loss``       calls a user's ``compute_loss`` with the arguments it takes.
``Model._loss_tracker``       holds the "loss" that the logs show, and how many examples it is of.
``Model._compile_loss``, ``_symbolic_build``  the loss has to be built before it is traced.
``TFOptimizer``, ``BaseOptimizer``  what an update does with several devices; without them.
``scale_loss_for_distribution``  divides a loss by the number of replicas, and
``unscale_loss_for_distribution``  multiplies it; an example's loss has nothing of either.
``_maybe_symbolic_build``, ``make_*_function``, ``reduce_per_replica``  what plain Keras cannot do
                              under some strategies; see ``keras_dp.distribution.trainer``.
``Model._initial_epoch``      where ``fit`` goes on after ``BackupAndRestore``: of several workers
                              only the chief may have what was backed up.
"""

import contextlib
import contextvars
import functools

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import trainer
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.losses import loss as losses
from keras.src.models.functional import Functional
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator

__all__ = ["TensorFlowTrainer", "trainer"]


class UpdatesOneDevice(TFOptimizer):
    """An optimizer whose update is run by its caller on every device, each with its own copies.

    Keras's own sums the gradients of all replicas first, which a private update has done
    already, and asks for the other replicas several times, which no branch of a graph may. Comes
    after an optimizer class in the bases of a class that joins the two.
    """

    def _backend_update_step(self, grads, trainable_variables, learning_rate):
        BaseOptimizer._backend_update_step(self, grads, trainable_variables, learning_rate)

    def _apply_weight_decay(self, variables):
        BaseOptimizer._apply_weight_decay(self, variables)

    def _overwrite_model_variables_with_average_value(self, trainable_variables):
        BaseOptimizer._overwrite_model_variables_with_average_value(self, trainable_variables)


def compiled_optimizer(model):
    """The optimizer that ``model`` was compiled with, or None.

    Keras wraps the optimizer of a mixed_float16 model in a ``LossScaleOptimizer``; this is
    the one inside.
    """
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer.inner_optimizer
    return optimizer


def own_strategy(model):
    """The strategy of ``tf.distribute`` in whose scope ``model`` was made, or None."""
    return model._distribute_strategy


def restored_epoch(model):
    """The epoch at which ``BackupAndRestore`` has the next ``fit`` go on, or None."""
    return model._initial_epoch


def set_restored_epoch(model, epoch):
    """Has ``fit`` go on at ``epoch``, as ``BackupAndRestore`` does; None leaves it to ``fit``."""
    model._initial_epoch = epoch


def all_layers(model):
    """``model`` itself and every layer nested in it, each once."""
    return list(model._flatten_layers())


def own_trainable_variables(layer):
    """The variables that ``layer`` itself created and that are to be trained."""
    if not layer.trainable:
        return []
    return [v for v in layer._trainable_variables if v.trainable]


def seed_generators(model):
    """Every random state that a call of ``model`` may advance, each once."""
    found = {id(g): g for layer in all_layers(model) for g in layer._seed_generators}
    found |= {id(g): g for g in _shared_seed_generators()}
    return list(found.values())


def make_shared_seed_generator():
    """Makes the generator that keras.random.* without a seed draws from, if it is not there.

    Which makes a variable: a trace that does so is thrown away by TensorFlow and done again.
    """
    with tf.init_scope():
        global_seed_generator()


def _shared_seed_generators():
    """That generator, if this thread has one: the threads of several replicas have none."""
    shared = global_state.get_global_attribute("global_seed_generator")
    return [] if shared is None else [shared]


def drew_random_numbers(layer, scope):
    """Whether ``layer``, or one nested in it, may have drawn in the pass that ``scope`` saw."""
    generators = [g for nested in all_layers(layer) for g in nested._seed_generators]
    generators += _shared_seed_generators()
    return any(scope.get_current_value(g.state) is not None for g in generators)


def state_variables(model):
    """The variables that a forward pass may change, random states apart."""
    known = {id(g.state) for g in seed_generators(model)}
    found = {id(v): v for v in model.non_trainable_variables}
    for layer in all_layers(model):
        if layer is not model:
            found |= {id(v): v for m in layer.metrics for v in m.variables}
    return [v for v in found.values() if id(v) not in known]


def is_graph_of_layers(model):
    """Whether calling ``model`` does no more than to call its operations one after another."""
    plain = keras.Sequential if isinstance(model, keras.Sequential) else Functional
    cls = type(model)
    return (
        isinstance(model, plain)
        and cls.call is plain.call
        and cls.__call__ is plain.__call__
        and not {"call", "__call__"} & vars(model).keys()
    )


def operations(model):
    """The layers and other operations of a graph of layers, each once."""
    return model.layers if isinstance(model, keras.Sequential) else model.operations


def symbolic_calls(operation):
    """``(args, kwargs)`` of every call of ``operation`` in a graph of layers."""
    return [(node.arguments.args, node.arguments.kwargs) for node in operation._inbound_nodes]


def arithmetic_operations():
    """The classes of what ``x + y``, ``-``, ``*`` and ``/`` put into a graph of layers."""
    x = keras.KerasTensor((None, 1))
    results = (x + x, x - x, x * x, x / x)
    return tuple(type(result._keras_history.operation) for result in results)


def get_mask(tensor):
    """The Keras mask attached to ``tensor``, or None."""
    return getattr(tensor, "_keras_mask", None)


def with_mask(tensor, mask):
    """``tensor`` with the Keras mask attached; unchanged when ``mask`` is None."""
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def accepted(layer, *, training, mask):
    """Those of the two arguments that the call of ``layer`` takes; a mask only if there is one."""
    given = {"training": training} if layer._call_has_training_arg else {}
    if mask is not None and layer._call_has_mask_arg:
        given["mask"] = mask
    return given


def call_model(model, x):
    """The forward pass of ``model`` as its own train step would run it."""
    return model(x, training=True) if model._call_has_training_arg else model(x)


def overrides_compute_loss(model):
    """Whether the model's class brings its own ``compute_loss``."""
    return type(model).compute_loss is not keras.Model.compute_loss


def batch_loss(model, x, y, y_pred, sample_weight):
    """The model's own loss of a batch, as Keras computes it."""
    return model._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)


def build(model, x, y, sample_weight):
    """Builds the compiled loss and metrics: they make variables, which no trace may do."""
    if model._compile_loss is not None and not model._compile_loss.built:
        with tf.init_scope():
            model._symbolic_build(data_batch=(x, y, sample_weight))


def track_loss(model, loss, count):
    """Adds a batch's ``loss`` over ``count`` examples to the "loss" of the logs."""
    model._loss_tracker.update_state(loss, sample_weight=count)


def examples_tracked(model):
    """How many examples the "loss" of the logs is a mean of, so far in this epoch."""
    return int(model._loss_tracker.count.numpy())


@contextlib.contextmanager
def output_losses_weighted_by(model, count):
    """While open, the losses of single outputs are logged with weight ``count``.

    Keras weights them by the static batch size, which a batch without its padding lacks.
    """
    trackers = model._compile_loss.metrics if model._compile_loss is not None else []
    for tracker in trackers:
        plain = tracker.update_state
        object.__setattr__(
            tracker,
            "update_state",
            lambda value, sample_weight=None, plain=plain: plain(value, sample_weight=count),
        )
    try:
        yield
    finally:
        for tracker in trackers:
            del tracker.__dict__["update_state"]


_is_example = contextvars.ContextVar("is_example", default=False)


@contextlib.contextmanager
def losses_of_examples():
    """While open, in this thread, losses are what they are, whatever the number of replicas.

    Under a strategy Keras divides a loss that is a mean by the number of replicas, for the sum
    of their gradients to be a mean again. A clipped sum has a divisor of its own.
    """
    token = _is_example.set(True)
    try:
        yield
    finally:
        _is_example.reset(token)


def install_losses_of_examples():
    """Makes Keras's two functions ask whether :func:`losses_of_examples` is open. Idempotent."""
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        plain = getattr(losses, name)
        if not getattr(plain, "keras_dp", False):
            setattr(losses, name, _unless_example(plain))


def _unless_example(plain):
    @functools.wraps(plain)
    def scaled(value):
        return value if _is_example.get() else plain(value)

    scaled.keras_dp = True
    return scaled


@contextlib.contextmanager
def without_weight_regularizers(variables):
    """While open, the regularizers of ``variables`` are set aside.

    They depend on no data. Their gradient is added outside the clip, so the loss of an
    example must not contain them.
    """
    kept = [(v, v.regularizer) for v in variables if v.regularizer is not None]
    for variable, _ in kept:
        variable.regularizer = None
    try:
        yield
    finally:
        for variable, regularizer in kept:
            variable.regularizer = regularizer
