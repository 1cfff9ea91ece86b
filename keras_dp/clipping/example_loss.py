"""One loss per example: the model's own loss, of each example as a batch of one.

So whatever the loss does with a batch (mean, sum, no reduction, weights, masks, several
outputs, a ``compute_loss`` of the user's), an example's loss depends on that example
alone, and there is no reduction to get wrong.
"""

import keras
import tensorflow as tf

from keras_dp import _keras
from keras_dp.clipping import rows


def loss_of(model, loss, x, y, y_pred, sample_weight):
    """The loss of a batch as a scalar: the given one, or the one the model was compiled with.

    Args:
      model: the model.
      loss: None, or a function ``loss(y, y_pred)`` that also takes ``sample_weight`` when
        weights are given.
      x, y, y_pred, sample_weight: the batch.
    """
    if loss is None:
        value = _keras.batch_loss(model, x, y, y_pred, sample_weight)
    elif sample_weight is None:
        value = loss(y, y_pred)
    else:
        value = loss(y, y_pred, sample_weight=sample_weight)
    # Without a reduction, Keras differentiates the sum of what is left.
    return tf.reduce_sum(tf.cast(value, tf.float32))


def example_losses(model, loss, variables, x, y, y_pred, sample_weight):
    """Float32 ``[batch]``: the loss of each example, weight regularizers left out.

    Nothing is written: metrics that the loss keeps stay as they are.
    """
    masks = keras.tree.map_structure(_keras.get_mask, y_pred)
    needs_x = loss is None and _keras.overrides_compute_loss(model)
    batch = (x if needs_x else None, y, y_pred, masks, sample_weight)
    tensors, rebuild = rows.flatten(batch)

    def one(row):
        x, y, y_pred, masks, weight = rows.single(rebuild(row))
        y_pred = keras.tree.map_structure(_keras.with_mask, y_pred, masks)
        return loss_of(model, loss, x, y, y_pred, weight)

    with keras.StatelessScope(), _keras.without_weight_regularizers(variables):
        return tf.vectorized_map(one, tensors)


def activity_losses(recorded):
    """Float32 ``[batch]`` or None: each example's activity regularizers.

    Args:
      recorded: pairs of regularizer and layer output.
    """
    total = None
    for regularizer, outputs in recorded:
        for output in tf.nest.flatten(outputs):
            loss = tf.vectorized_map(
                lambda o, r=regularizer: tf.cast(tf.reduce_sum(r(o[None])), tf.float32), output
            )
            total = loss if total is None else total + loss
    return total
