"""Small helpers that several rules share."""

import math

import tensorflow as tf


def flatten_positions(tensor, width):
    """``[batch, ..., width]`` -> ``[batch, T, width]``, T static where it can be."""
    positions = tensor.shape[1:-1]
    known = None not in positions
    count = math.prod(positions) if known else -1
    batch = tf.shape(tensor)[0]
    if tensor.shape.rank == 3:
        return tensor
    if not known:
        count = tf.reduce_prod(tf.shape(tensor)[1:-1])
    result = tf.reshape(tensor, tf.stack([batch, count, width]))
    result.set_shape([tensor.shape[0], math.prod(positions) if known else None, width])
    return result


def sum_to(gradient, shape):
    """Per-example gradient of a weight of ``shape`` that was added by broadcasting.

    Args:
      gradient: ``[batch, ...]``, gradient of the sum.
      shape: the weight's shape, broadcast from the right as NumPy does.

    Returns:
      float32 ``[batch, *shape]``.
    """
    gradient = tf.cast(gradient, tf.float32)
    rank = gradient.shape.rank - 1
    padded = [1] * (rank - len(shape)) + list(shape)
    axes = [k + 1 for k in range(rank) if padded[k] == 1 and gradient.shape[k + 1] != 1]
    summed = tf.reduce_sum(gradient, axes, keepdims=True) if axes else gradient
    return tf.reshape(summed, [tf.shape(gradient)[0], *shape])
