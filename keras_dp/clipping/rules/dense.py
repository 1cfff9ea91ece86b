"""Dense and EinsumDense: a product with a kernel, and a bias."""

import math

import tensorflow as tf

from keras_dp.clipping import shapes
from keras_dp.clipping.forms import IN_ORDER, Layout, PerExample, Product
from keras_dp.clipping.rules.axes import flatten_positions, sum_to


def dense(use, g):
    """Dense: z = x @ kernel + bias at each position of x ``[batch, ..., D]``."""
    layer, x = use.layer, use.input
    kernel = layer._kernel
    if kernel.trainable:
        yield kernel, matrix_product(x, g, kernel.shape)
    if layer.bias is not None and layer.bias.trainable:
        yield layer.bias, PerExample(sum_to(g, layer.bias.shape), layer.bias.shape)


def matrix_product(x, g, shape):
    """The form of a matrix ``[D, P]`` in z = x @ matrix, x ``[batch, ..., D]``."""
    a, g = (flatten_positions(_with_position(t), n) for t, n in zip((x, g), shape))
    return Product(tf.expand_dims(a, 1), tf.expand_dims(g, 1), shape)


def _with_position(x):
    return tf.expand_dims(x, 1) if x.shape.rank == 2 else x


def einsum_dense(use, g):
    """EinsumDense: z = einsum(equation, x, kernel) + bias."""
    layer, x = use.layer, use.input
    kernel = layer._kernel
    if kernel.trainable:
        inputs, weights, outputs = labels(layer.equation, x, g)
        yield kernel, einsum_product(x, inputs, g, outputs, weights, kernel.shape)
    if layer.bias is not None and layer.bias.trainable:
        yield layer.bias, PerExample(sum_to(g, layer.bias.shape), layer.bias.shape)


def einsum_product(x, inputs, g, outputs, weights, shape):
    """The form of a weight in z = einsum("inputs,weights->outputs", x, weight).

    Every label is of one kind: a position (in x and z), contracted (in x and weight), new
    (in weight and z), a block (in all three), or summed away (in x alone).

    Args:
      x: the input; g: the gradient of z.
      inputs, outputs, weights: lists of labels, the batch first in the former two.
      shape: the weight's shape.
    """
    batch = inputs[0]
    blocks = [k for k in weights if k in inputs and k in outputs]
    contracted = [k for k in weights if k in inputs and k not in outputs]
    new = [k for k in weights if k not in inputs]
    positions = [k for k in inputs if k in outputs and k not in weights and k != batch]
    a = arranged(x, inputs, batch, blocks, positions, contracted)
    b = arranged(g, outputs, batch, blocks, positions, new)
    sizes = dict(zip(weights, shape))
    order = blocks + contracted + new
    layout = Layout(tuple(sizes[k] for k in order), tuple(order.index(k) for k in weights))
    return Product(a, b, shape, IN_ORDER if order == list(weights) else layout)


def labels(equation, x, g):
    """The equation's three terms as lists of labels, the ellipsis written out.

    In the order of the equation: those of x, of the kernel and of the output, whose gradient
    is g.
    """
    left, outputs = equation.replace(" ", "").split("->")
    inputs, weights = left.split(",")
    return _expanded(inputs, x.shape.rank), list(weights), _expanded(outputs, g.shape.rank)


def _expanded(term, rank):
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    count = rank - len(before) - len(after)
    # From the right, as broadcasting lines them up.
    return [*before, *(f".{k}" for k in range(count, 0, -1)), *after]


def arranged(tensor, names, batch, blocks, positions, last):
    """``tensor`` as ``[batch, S, T, D]``; names of none of these kinds are summed away."""
    kept = [batch, *blocks, *positions, *last]
    gone = [i for i, k in enumerate(names) if k not in kept]
    if gone:
        tensor = tf.reduce_sum(tensor, gone)
        names = [k for k in names if k in kept]
    tensor = tf.transpose(tensor, [names.index(k) for k in kept])
    sizes, start = [], 1
    for group in (blocks, positions, last):
        axes = range(start, start + len(group))
        known = [tensor.shape[axis] for axis in axes]
        unknown = None in known
        sizes.append(
            tf.reduce_prod(tf.gather(tf.shape(tensor), axes)) if unknown else math.prod(known)
        )
        start += len(group)
    return shapes.rows(tensor, *sizes)
