"""The private train step and how Keras reaches it.

Keras hands an optimizer the gradient of the batch mean, which is too late. So importing
keras_dp makes the TensorFlow trainer's ``train_step`` ask first: with a DP optimizer the
private step runs, with any other the step that was there before.
"""

import functools

import tensorflow as tf

from keras_dp import _keras, padding
from keras_dp.clipping import compilation, gradients, rows
from keras_dp.distribution import trainer
from keras_dp.errors import PrivacyError
from keras_dp.optimizers.base import private_optimizer
from keras_dp.pieces import Piece


def private_train_step(model, optimizer, data):
    """One private update on a batch, and the logs that Keras expects.

    Where a logical batch has several parts, only the last one updates; see
    :class:`~keras_dp.optimizers.base.DPOptimizer`.

    Args:
      model: a compiled ``keras.Model``.
      optimizer: its DP optimizer.
      data: ``(x,)``, ``(x, y)`` or ``(x, y, sample_weight)``; x may be a
        :class:`~keras_dp.pieces.Piece`.

    Returns:
      dict of metric results, as ``keras.Model.train_step`` returns. They are computed from
      the private data without noise: what they show is not covered by the guarantee.
    """
    _refuse_secure_noise_under_xla(model, optimizer)
    x, y, sample_weight, given = _unpack(data)
    tpu = compilation.is_for_tpu()
    xla = model.jit_compile or tpu
    if not xla:
        x, y, sample_weight = _without_last_padding(
            x, y, sample_weight, optimizer.examples_per_user or 1
        )
    logs, by_itself = {}, xla and not tpu and trainer.is_distributed(model)

    def observe(result, batch):
        logs.update(_update_metrics(model, result, batch))

    with compilation.outside_xla(not xla):
        clipped = gradients.accumulate(
            model,
            x,
            y,
            sample_weight,
            optimizer=optimizer,
            given=given,
            observe=observe,
            jit_compile=by_itself,
        )
    optimizer.apply_gradients(clipped)
    if by_itself or optimizer.microbatch_size is not None or optimizer.backend == "loop":
        return model.get_metrics_result()
    return logs


def _update_metrics(model, result, batch):
    """Loss and metrics of the rows of one pass, by Keras's own code; padding left out."""
    x, y, sample_weight = batch.x, batch.y, batch.sample_weight
    y_pred, activity = result.y_pred, result.activity
    if batch.real is not None:
        x, y, y_pred, sample_weight, activity = rows.select(
            (x, y, y_pred, sample_weight, activity), batch.real
        )
    count = rows.count((y_pred,))
    with _keras.output_losses_weighted_by(model, count):
        loss = _keras.batch_loss(model, x, y, y_pred, sample_weight)
    if activity is not None:
        loss += tf.math.divide_no_nan(tf.reduce_sum(activity), tf.cast(count, tf.float32))
    _keras.track_loss(model, loss, count)
    return model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)


def _unpack(data):
    if not isinstance(data, (tuple, list)):
        data = (data,)
    x, y, sample_weight = (*data, None, None)[:3]
    # A PyDataset without targets stands an empty tuple in their place.
    y = None if isinstance(y, tuple) and not y else y
    given = rows.flatten((x, y, sample_weight))[0][0]
    return *rows.to_tensors((x, y, sample_weight)), given


def _without_last_padding(x, y, sample_weight, per_user):
    """The batch up to its last example, or user, and one if there is none: padding is no work.

    Not for XLA, which would compile every size anew.
    """
    real = padding.real_rows(sample_weight)
    if real is None:
        return x, y, sample_weight
    number = tf.reduce_max(tf.where(real, tf.range(tf.size(real)) + 1, 0))
    number = tf.minimum(per_user * tf.maximum(-(-number // per_user), 1), tf.size(real))
    inputs = x.x if isinstance(x, Piece) else x
    inputs, y, sample_weight = rows.take((inputs, y, sample_weight), 0, number)
    return x._replace(x=inputs) if isinstance(x, Piece) else inputs, y, sample_weight


def _refuse_secure_noise_under_xla(model, optimizer):
    if (
        optimizer.noise_source == "secure"
        and model.jit_compile
        and not trainer.is_distributed(model)
    ):
        raise PrivacyError(
            'noise_source="secure" is drawn outside the graph, which XLA cannot compile. Pass '
            "jit_compile=False to compile, or take the default noise source."
        )


def _refuse_pieces(data):
    if isinstance(data, tuple) and data and isinstance(data[0], Piece):
        raise PrivacyError(
            "The sampler delivers each draw in pieces (physical_batch_size=), which only a DP "
            "optimizer puts together again. Compile with one, or leave physical_batch_size out."
        )


def install():
    """Makes Keras's TensorFlow trainer run the private step for DP optimizers. Idempotent."""
    plain = _keras.TensorFlowTrainer.train_step
    if getattr(plain, "keras_dp", False):
        return

    @functools.wraps(plain)
    def train_step(self, data):
        optimizer = private_optimizer(self)
        if optimizer is None:
            _refuse_pieces(data)
            return plain(self, data)
        return private_train_step(self, optimizer, data)

    train_step.keras_dp = True
    _keras.TensorFlowTrainer.train_step = train_step
