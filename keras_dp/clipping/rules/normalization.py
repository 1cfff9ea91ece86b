"""Layer, group and RMS normalization: a scale and an offset on a normalized input.

The rule computes the layer itself, with a copy of scale and offset for every example. The
gradients of the copies are what the backward pass sums up anyway. That pass is written out: it
needs the normalized input alone, so that the input is not kept.
"""

import math

import keras
import tensorflow as tf

from keras_dp.clipping import shapes
from keras_dp.clipping.forms import PerExample


def holds(layer):
    """Whether the axes lie side by side and the rule knows what the input is divided by."""
    axes = _axes(layer)
    if isinstance(layer, keras.layers.RMSNormalization) and axes[-1] != -1:
        return False  # Keras multiplies by the scale along the last axes, whatever it normalizes
    side_by_side = axes == list(range(axes[0], axes[0] + len(axes)))
    return side_by_side and not getattr(layer, "rms_scaling", False)


def record(use, call, watch):
    """Computes the layer as Keras defines it, in float32 or better."""
    layer, x = use.layer, use.input
    before, groups, depth, after = _sizes(layer, x)
    precise = tf.float64 if x.dtype == tf.float64 else tf.float32
    batch = tf.shape(x)[0]
    copies = []
    for weight in _weights(layer):
        if weight is None:
            copies.append(None)
            continue
        copy = tf.broadcast_to(tf.cast(weight.value, precise), [batch, *weight.shape])
        copy.set_shape([x.shape[0], *weight.shape])
        if weight.trainable:
            watch(copy)
        copies.append(shapes.rows(copy, 1, groups, depth, 1))
    z = normalized(
        shapes.rows(tf.cast(x, precise), before, groups, depth, after),
        *copies,
        with_positions=isinstance(layer, keras.layers.GroupNormalization),
        centred=not isinstance(layer, keras.layers.RMSNormalization),
        epsilon=layer.epsilon,
    )
    z = tf.reshape(z, tf.shape(x)) if None in x.shape[1:] else shapes.rows(z, *x.shape[1:])
    z.set_shape(x.shape)
    return tf.cast(z, layer.compute_dtype)


def forms(use, *gradients):
    """The gradients of the copies."""
    trained = [w for w in _weights(use.layer) if w is not None and w.trainable]
    for weight, g in zip(trained, gradients):
        yield weight, PerExample(g, weight.shape)


def normalized(x, scale, offset, *, with_positions, centred, epsilon):
    """scale * (x - mean) / sqrt(variance + epsilon) + offset, with its gradient.

    For n = (x - mean) / s, s = sqrt(variance + epsilon), and the gradient g of the result,

        d x = (g scale - mean(g scale) - n mean(g scale n)) / s

    with means over the numbers that are normalized together.

    Args:
      x: ``[batch, T, G, D, U]``: G groups of D channels at T x U positions.
      scale, offset: ``[batch, 1, G, D, 1]``, or None.
      with_positions: whether a group is normalized over D, T and U together, or over D alone.
      centred: whether the mean is taken off. Else it counts as 0, in the variance too.
      epsilon: float.
    """

    def mean(t):
        if with_positions:
            t = tf.reduce_mean(t, [1, 4], keepdims=True)
        return tf.reduce_mean(t, 3, keepdims=True)

    @tf.custom_gradient
    def run(x, *weights):
        centre = mean(x) if centred else None
        away = x - centre if centred else x
        inverse = tf.math.rsqrt(mean(tf.square(away)) + epsilon)
        n = z = away * inverse
        if scale is not None:
            z *= weights[0]
        if offset is not None:
            z += weights[-1]

        def backward(g):
            of_offset, of_scale = tf.reduce_sum(g, [1, 4], keepdims=True), None
            scaled = g if scale is None else g * weights[0]
            along_n = scaled * n
            if scale is not None:
                of_scale = tf.reduce_sum(g * n, [1, 4], keepdims=True)
            rest = n * mean(along_n)
            if centred:
                rest += mean(scaled)
            given = (of_scale, scale), (of_offset, offset)
            return (scaled - rest) * inverse, *(g for g, weight in given if weight is not None)

        return z, backward

    return run(x, *(w for w in (scale, offset) if w is not None))


def _weights(layer):
    """Scale and offset, or None. RMSNormalization calls "scale" what the others call "gamma"."""
    scale = getattr(layer, "gamma", None)
    if isinstance(layer, keras.layers.RMSNormalization):
        scale = layer.scale
    return scale, getattr(layer, "beta", None)


def _axes(layer):
    return list(layer.axis) if isinstance(layer.axis, (list, tuple)) else [layer.axis]


def _sizes(layer, x):
    """Positions before the axes, groups, channels of a group, and positions after the axes."""
    axes = [axis % x.shape.rank for axis in _axes(layer)]
    first, behind = axes[0], axes[-1] + 1
    groups = layer.groups if isinstance(layer, keras.layers.GroupNormalization) else 1
    depth = math.prod(x.shape[first:behind]) // groups
    return _count(x, 1, first), groups, depth, _count(x, behind, x.shape.rank)


def _count(x, start, stop):
    sizes = x.shape[start:stop]
    return tf.reduce_prod(tf.shape(x)[start:stop]) if None in sizes else math.prod(sizes)
