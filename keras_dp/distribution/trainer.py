"""What plain Keras 3.12 to 3.15 cannot do under a strategy, for models with a DP optimizer.

Each fails there with an error that does not name it, but for the last, which goes wrong silently:

- the first batch is reduced over the replicas, only to learn its shapes: not possible when the
  replicas have different numbers of rows, nor for a nest of tensors under
  ``MultiWorkerMirroredStrategy``;
- there, scalar metrics are reduced over an axis that they have not got;
- ``steps_per_execution`` puts the devices' work into a loop in the graph, which TensorFlow cannot
  do: here that many steps run one after another;
- ``jit_compile`` hands the work of all devices to XLA at once, which reaches one device only:
  here each replica's clipped sum is compiled by itself;
- ``train_on_batch`` and ``test_on_batch`` give the whole batch to every replica, so that each
  example would be in the clipped sum once for each: here a replica gets its share.

Models without a DP optimizer, and those under no strategy, are left to Keras.
"""

import contextlib
import functools

import tensorflow as tf

from keras_dp import _keras
from keras_dp.distribution.cluster import workers_of
from keras_dp.distribution.data import shared_out
from keras_dp.optimizers.base import private_optimizer
from keras_dp.pieces import Piece


def is_distributed(model):
    """Whether ``model`` trains privately under a strategy of ``tf.distribute``."""
    return private_optimizer(model) is not None and _keras.own_strategy(model) is not None


@contextlib.contextmanager
def _one_plain_step(model):
    """While open, functions of ``model`` are made of one step, and not for XLA."""
    steps, jit_compile = model.steps_per_execution, model.jit_compile
    model.steps_per_execution, model.jit_compile = 1, False
    try:
        yield
    finally:
        model.steps_per_execution, model.jit_compile = steps, jit_compile


def _on_shares(model, step):
    """``step``, of which each replica gets its share of a batch that comes as a whole."""

    def one(iterator):
        if isinstance(iterator, tf.data.Iterator | tf.distribute.DistributedIterator):
            return step(iterator)
        per_user = private_optimizer(model).examples_per_user or 1
        return step(iter([shared_out(next(iterator), model.distribute_strategy, per_user)]))

    return one


def _several(model, step, number):
    """A function that does ``number`` steps, fewer at the end of the data."""

    def one(iterator):
        # Keras reads how many when it traces, which is now.
        model.steps_per_execution = 1
        try:
            return step(iterator)
        finally:
            model.steps_per_execution = number

    def steps(iterator):
        logs = one(iterator)
        for _ in range(number - 1):
            try:
                logs = one(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                break
        return logs

    return steps


def _dispatch_make(name, function):
    plain = getattr(_keras.TensorFlowTrainer, name)

    @functools.wraps(plain)
    def make(self, force=False):
        if not is_distributed(self):
            return plain(self, force)
        if getattr(self, function) is None or force:
            number = self.steps_per_execution
            with _one_plain_step(self):
                plain(self, force=True)
            step = _on_shares(self, getattr(self, function))
            setattr(self, function, step if number == 1 else _several(self, step, number))
        return getattr(self, function)

    make.keras_dp = True
    setattr(_keras.TensorFlowTrainer, name, make)


def _without_piece(batch):
    """A batch as the model takes it: the inputs of a piece, without what says which it is."""
    if isinstance(batch, tuple) and batch and isinstance(batch[0], Piece):
        return (batch[0].x, *batch[1:])
    return batch


def _dispatch_build():
    plain = _keras.TensorFlowTrainer._maybe_symbolic_build

    @functools.wraps(plain)
    def build(self, iterator=None, data_batch=None):
        if not is_distributed(self) or iterator is None:
            return plain(self, iterator, data_batch)
        strategy = self.distribute_strategy
        for _, _, batches in iterator:
            local = tf.nest.map_structure(
                lambda t: strategy.experimental_local_results(t)[0], next(batches)
            )
            return plain(self, data_batch=_without_piece(local))

    build.keras_dp = True
    _keras.TensorFlowTrainer._maybe_symbolic_build = build


def _dispatch_reduction():
    plain = _keras.trainer.reduce_per_replica

    @functools.wraps(plain)
    def reduce_per_replica(values, strategy, reduction):
        if reduction not in ("auto", "mean") or workers_of(strategy) == 1:
            return plain(values, strategy, reduction)
        return tf.nest.map_structure(lambda v: strategy.reduce("MEAN", v, axis=None), values)

    _keras.trainer.reduce_per_replica = reduce_per_replica


def install():
    """Wraps the methods of Keras's TensorFlow trainer that are named above. Idempotent."""
    if getattr(_keras.TensorFlowTrainer.make_train_function, "keras_dp", False):
        return
    _dispatch_make("make_train_function", "train_function")
    _dispatch_make("make_test_function", "test_function")
    _dispatch_build()
    _dispatch_reduction()
    _keras.install_losses_of_examples()
