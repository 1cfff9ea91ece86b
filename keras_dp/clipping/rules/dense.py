"""Dense and EinsumDense: a product with a kernel, and a bias."""

import math

import tensorflow as tf

from keras_dp.clipping.forms import PerExample, Product
from keras_dp.clipping.rules.axes import flatten_positions, sum_to


def dense(use, g):
    """Dense: z = x @ kernel + bias at each position of x ``[batch, ..., D]``."""
    layer, x = use.layer, use.input
    kernel = layer._kernel
    if kernel.trainable:
        depth, width = kernel.shape
        a = flatten_positions(_with_position(x), depth)[:, None]
        b = flatten_positions(_with_position(g), width)[:, None]
        yield kernel, Product(a, b, lambda w: tf.squeeze(w, -3), kernel.shape)
    if layer.bias is not None and layer.bias.trainable:
        yield layer.bias, PerExample(sum_to(g, layer.bias.shape), layer.bias.shape)


def _with_position(x):
    return x[:, None] if x.shape.rank == 2 else x


def einsum_dense(use, g):
    """EinsumDense: z = einsum(equation, x, kernel) + bias.

    Every label is of one kind: a position (in x and z), contracted (in x and kernel), new
    (in kernel and z), a block (in all three), or summed away (in x alone).
    """
    layer, x = use.layer, use.input
    kernel = layer._kernel
    if kernel.trainable:
        inputs, weights, outputs = _labels(layer.equation, x.shape.rank, g.shape.rank)
        batch = inputs[0]
        blocks = [k for k in weights if k in inputs and k in outputs]
        contracted = [k for k in weights if k in inputs and k not in outputs]
        new = [k for k in weights if k not in inputs]
        positions = [k for k in inputs if k in outputs and k not in weights and k != batch]
        a = _arranged(x, inputs, batch, blocks, positions, contracted)
        b = _arranged(g, outputs, batch, blocks, positions, new)
        sizes = dict(zip(weights, kernel.shape))
        order = blocks + contracted + new

        def to_weight(w):
            lead = w.shape.rank - 3
            w = tf.reshape(w, tf.concat([tf.shape(w)[:lead], [sizes[k] for k in order]], 0))
            axes = [lead + order.index(k) for k in weights]
            return tf.transpose(w, [*range(lead), *axes])

        yield kernel, Product(a, b, to_weight, kernel.shape)
    if layer.bias is not None and layer.bias.trainable:
        yield layer.bias, PerExample(sum_to(g, layer.bias.shape), layer.bias.shape)


def _labels(equation, input_rank, output_rank):
    """The equation's three terms as lists of labels, the ellipsis written out."""
    left, outputs = equation.replace(" ", "").split("->")
    inputs, weights = left.split(",")
    ranks = (input_rank, output_rank)
    return (
        _expanded(inputs, ranks[0]),
        list(weights),
        _expanded(outputs, ranks[1]),
    )


def _expanded(term, rank):
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    count = rank - len(before) - len(after)
    # From the right, as broadcasting lines them up.
    return [*before, *(f".{k}" for k in range(count, 0, -1)), *after]


def _arranged(tensor, labels, batch, blocks, positions, last):
    """``tensor`` as ``[batch, S, T, D]``; labels of none of these kinds are summed away."""
    kept = [batch, *blocks, *positions, *last]
    gone = [i for i, k in enumerate(labels) if k not in kept]
    if gone:
        tensor = tf.reduce_sum(tensor, gone)
        labels = [k for k in labels if k in kept]
    tensor = tf.transpose(tensor, [labels.index(k) for k in kept])
    static = dict(zip(kept, tensor.shape))
    dynamic = tf.shape(tensor)

    def size(group, start):
        sizes = [static[k] for k in group]
        if None in sizes:
            return None, tf.reduce_prod(dynamic[start : start + len(group)])
        return math.prod(sizes), math.prod(sizes)

    start, shape, known = 1, [dynamic[0]], [tensor.shape[0]]
    for group in (blocks, positions, last):
        fixed, value = size(group, start)
        known.append(fixed)
        shape.append(value)
        start += len(group)
    tensor = tf.reshape(tensor, tf.stack(shape))
    tensor.set_shape(known)
    return tensor
