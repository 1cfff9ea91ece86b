"""LoRA: a frozen weight and a trained product of two thin factors.

In place of the weight K, layers with LoRA use K + s A B, where A has few columns and s is
alpha / rank (Hu et al. 2021, arXiv 2106.09685, section 4.1). By the chain rule the gradient
of A is that of K times s B^T, and the gradient of B is s A^T times that of K. Both are again
products of something known at each position with the gradient of the output, so neither
needs the gradient of K.

Each rule here is that of the plain layer, which answers for what else is trained, and these
two factors.
"""

import tensorflow as tf

from keras_dp.clipping.forms import Product
from keras_dp.clipping.rules import convolution as plain_convolution
from keras_dp.clipping.rules import dense as plain_dense
from keras_dp.clipping.rules import embedding as plain_embedding
from keras_dp.clipping.rules.rule import without_lora
from keras_dp.clipping.rules.windows import Windows, spatial_sizes

_RANK = "rank"


def dense(use, g):
    """Dense: z = x @ (kernel + s A B) + bias."""
    yield from plain_dense.dense(use, g)
    if use.layer.lora_enabled:
        a, b, s = _factors(use.layer, "kernel")
        yield from matrix_factors(a, b, s, use.input, g)


def matrix_factors(a, b, s, x, g):
    """The forms of A ``[D, R]`` and B ``[R, P]`` in z = x @ (K + s A B)."""
    x, g = tf.cast(x, tf.float32), tf.cast(g, tf.float32)
    if a.trainable:
        yield a, plain_dense.matrix_product(x, s * _times_transposed(g, b), a.shape)
    if b.trainable:
        yield b, plain_dense.matrix_product(s * _times(x, a), g, b.shape)


def embedding(use, g):
    """Embedding: z = (table + s A B)[ids]."""
    yield from plain_embedding.embedding(use, g)
    if use.layer.lora_enabled:
        a, b, s = _factors(use.layer, "embeddings")
        g = tf.cast(g, tf.float32)
        if a.trainable:
            yield a, plain_embedding.rows_read(use.input, s * _times_transposed(g, b), a.shape)
        if b.trainable:
            read = tf.gather(_value(a), plain_embedding.table_ids(use.input, a.shape[0]))
            yield b, plain_dense.matrix_product(s * read, g, b.shape)


def reversed_embedding(layer, x, g):
    """The same table the other way round: z = x @ (table + s A B)^T."""
    a, b, s = _factors(layer, "embeddings")
    x, g = tf.cast(x, tf.float32), tf.cast(g, tf.float32)
    if a.trainable:
        yield a, plain_dense.matrix_product(g, s * _times_transposed(x, b), a.shape)
    if b.trainable:
        yield b, plain_dense.matrix_product(s * _times(g, a), x, b.shape)


def einsum_dense(use, g):
    """EinsumDense: z = einsum(equation, x, kernel + s A B) + bias.

    B replaces the kernel's last axis, so A is the kernel of the same equation with the rank
    in the place of that label, and what it gives is what B is multiplied by.
    """
    yield from plain_dense.einsum_dense(use, g)
    if not use.layer.lora_enabled:
        return
    a, b, s = _factors(use.layer, "kernel")
    x, g = tf.cast(use.input, tf.float32), tf.cast(g, tf.float32)
    inputs, weights, outputs = plain_dense.labels(use.layer.equation, x, g)
    last = weights[-1]
    thin = [*weights[:-1], _RANK]
    hidden = [_RANK if k == last else k for k in outputs]
    if a.trainable:
        of_hidden = s * _einsum((outputs, g), ([_RANK, last], _value(b)), hidden)
        yield a, plain_dense.einsum_product(x, inputs, of_hidden, hidden, thin, a.shape)
    if b.trainable:
        between = s * _einsum((inputs, x), (thin, _value(a)), hidden)
        batch, *positions = (k for k in outputs if k != last)
        left = plain_dense.arranged(between, hidden, batch, [], positions, [_RANK])
        right = plain_dense.arranged(g, outputs, batch, [], positions, [last])
        yield b, Product(left, right, b.shape)


def convolution(use, g):
    """Conv1D, Conv2D, Conv3D: z = conv(x, kernel + s A B) + bias.

    A is the kernel of the same convolution with as many filters as the rank, and B is multiplied
    at each position with what that gives.
    """
    yield from plain_convolution.convolution(use, g)
    if not use.layer.lora_enabled:
        return
    a, b, s = _factors(use.layer, "kernel")
    windows = Windows.of(use.layer)
    x, g = (
        tf.cast(plain_convolution.channels_last(use.layer, t), tf.float32) for t in (use.input, g)
    )
    if a.trainable:
        of_hidden = s * _times_transposed(g, b)
        yield a, plain_convolution.Convolution(windows, x, of_hidden, a.shape)
    if b.trainable:
        padded = windows.pad(x, spatial_sizes(g))
        between = tf.nn.convolution(
            padded, s * _value(a), windows.strides, "VALID", dilations=windows.dilation_rate
        )
        yield b, plain_dense.matrix_product(between, g, b.shape)


def is_ungrouped(layer):
    """Whether the filters of a convolution all see the same inputs, if it has factors."""
    return without_lora(layer) or layer.groups == 1


def with_or_without(layer):
    """Always True: the rule answers for the factors where there are any."""
    return True


def is_product(layer):
    """Whether B of an EinsumDense is multiplied at each position, if it has a B.

    So it is when the kernel's last label is in the output and not in the input.
    """
    if without_lora(layer):
        return True
    left, outputs = layer.equation.replace(" ", "").split("->")
    inputs, weights = left.split(",")
    return weights[-1] in outputs and weights[-1] not in inputs


def _factors(layer, name):
    a, b = getattr(layer, f"lora_{name}_a"), getattr(layer, f"lora_{name}_b")
    return a, b, layer.lora_alpha / layer.lora_rank


def _value(variable):
    return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def _times(x, variable):
    return tf.tensordot(x, _value(variable), 1)


def _times_transposed(x, variable):
    return tf.tensordot(x, _value(variable), [[-1], [1]])


def _einsum(first, second, result):
    """``tf.einsum`` of pairs (labels, tensor), whatever the labels are called."""
    letters = {}
    for label in (*first[0], *second[0]):
        letters.setdefault(label, chr(ord("a") + len(letters)))
    terms = ["".join(letters[k] for k in names) for names in (first[0], second[0], result)]
    return tf.einsum(f"{terms[0]},{terms[1]}->{terms[2]}", first[1], second[1])
