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


def example_losses(model, loss, variables, x, y, y_pred, sample_weight, scale):
    """The loss of each example, weight regularizers left out, and where its gradient begins.

    Nothing is written: metrics that the loss keeps stay as they are.

    Args:
      scale: factor on the gradients, a number or float32 ``[batch]``.
      Others as in :func:`loss_of`.

    Returns:
      ``(losses, starts, given)``: float32 ``[batch]``; pairs of a tensor and the gradient of
      ``scale`` times the sum of the losses with respect to it; and the tensors that were handed to
      the loss row by row, or None when it may read more of the model.
    """
    masks = keras.tree.map_structure(_keras.get_mask, y_pred)
    own = loss is None and _keras.overrides_compute_loss(model)
    others, rebuild = rows.flatten((x if own else None, y, masks, sample_weight))
    predicted, rebuild_predicted = rows.flatten(y_pred)

    def value(predicted, others):
        x, y, masks, weight = rows.single(rebuild(others))
        y_pred = rows.single(rebuild_predicted(predicted))
        y_pred = keras.tree.map_structure(_keras.with_mask, y_pred, masks)
        return loss_of(model, loss, x, y, y_pred, weight)

    with keras.StatelessScope(), _keras.without_weight_regularizers(variables):
        if own:
            # It may read more of the model than its outputs, so the whole of it is taped.
            losses = tf.vectorized_map(lambda row: value(*row), (predicted, others))
            return losses, [(losses, scale * tf.ones_like(losses))], None
        predicted_alone = [tf.stop_gradient(t) for t in predicted]
        losses, gradients = _by_rows(value, predicted_alone, others, scale)
        starts = [(t, g) for t, g in zip(predicted, gradients) if t.dtype.is_floating]
        return losses, starts, [*predicted_alone, *others]


def activity_losses(recorded, scale):
    """The activity regularizers of each example, and where their gradients begin.

    Args:
      recorded: triples of regularizer, layer output, and its consecutive rows for an example.
      scale: factor on the gradients, a number or one for each row of the batch.

    Returns:
      ``(losses, starts)`` as of :func:`example_losses`; the losses are None without regularizers.
    """
    total, starts = None, []
    for regularizer, outputs, count in recorded:
        for output in tf.nest.flatten(outputs):

            def value(output, others, regularizer=regularizer):
                return tf.cast(tf.reduce_sum(regularizer(output[0][None])), tf.float32)

            per_row = tf.repeat(scale, count) if tf.is_tensor(scale) else scale
            losses, (gradient,) = _by_rows(value, [tf.stop_gradient(output)], [], per_row)
            losses = tf.reduce_sum(tf.reshape(losses, [-1, count]), 1)
            total = losses if total is None else total + losses
            starts.append((output, gradient))
    return total, starts


def _by_rows(value, differentiated, others, scale):
    """Values of rows, and gradients that are taken row by row too.

    A tape around ``tf.vectorized_map`` would give the same, but XLA compiles what that makes
    of it anew in every step.
    """

    def one(row):
        differentiated, others, scale = row
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(differentiated)
            result = value(differentiated, others)
            scaled = scale * result
        found = tape.gradient(
            scaled, differentiated, unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return result, found

    if not tf.is_tensor(scale):
        scale = tf.fill(tf.shape(differentiated[0])[:1], float(scale))
    batch = (differentiated, others, scale)
    try:
        return tf.vectorized_map(one, batch)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError):
        # Losses with control flow of their own; an error of the loss itself comes again.
        specs = [tf.TensorSpec(t.shape[1:], t.dtype) for t in differentiated]
        return tf.map_fn(
            one,
            batch,
            fn_output_signature=(tf.TensorSpec([], tf.float32), specs),
            parallel_iterations=1,
        )
