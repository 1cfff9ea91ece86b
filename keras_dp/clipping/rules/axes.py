"""Small helpers that several rules share."""

import math

import tensorflow as tf

from keras_dp.clipping import shapes


def flatten_positions(tensor, width):
    """``[batch, ..., width]`` -> ``[batch, T, width]``, T static where it can be."""
    if tensor.shape.rank == 3:
        return tensor
    positions = tensor.shape[1:-1]
    return shapes.rows(tensor, None if None in positions else math.prod(positions), width)


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
    return shapes.rows(summed, *shape)
