"""Layer, group and RMS normalization: a scale and an offset on a normalized input."""

import keras
import tensorflow as tf

from keras_dp.clipping import shapes
from keras_dp.clipping.forms import PerExample


def affine(use, g):
    """z = scale * normalized(x) + offset.

    The normalized input is what the layer gives with scale 1 and offset 0; dividing it out
    of z would fail where the scale is 0.
    """
    layer, x = use.layer, use.input
    scale = getattr(layer, "gamma", None)
    if scale is None:
        scale = getattr(layer, "scale", None)
    if not isinstance(scale, keras.Variable):
        scale = None
    offset = getattr(layer, "beta", None)
    g = tf.cast(g, tf.float32)
    axes = _parameter_axes(layer, x.shape.rank)
    if scale is not None and scale.trainable:
        neutral = [(scale, tf.ones(scale.shape, scale.dtype))]
        if offset is not None:
            neutral.append((offset, tf.zeros(offset.shape, offset.dtype)))
        with keras.StatelessScope(state_mapping=neutral):
            normalized = tf.cast(layer.call(x), tf.float32)
        yield scale, PerExample(_summed(g * normalized, axes, scale.shape), scale.shape)
    if offset is not None and offset.trainable:
        yield offset, PerExample(_summed(g, axes, offset.shape), offset.shape)


def _parameter_axes(layer, rank):
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else [layer.axis]
    return {axis % rank for axis in axes}


def _summed(values, axes, shape):
    others = [k for k in range(1, values.shape.rank) if k not in axes]
    summed = tf.reduce_sum(values, others) if others else values
    return shapes.rows(summed, *shape)
