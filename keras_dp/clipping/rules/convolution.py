"""Convolutions of one, two and three dimensions, ordinary and depthwise.

The gradient of the kernel is a product of the input's patches and the output's gradient,
summed over output positions. Which way to its per-example norm is fast depends on the
shape: see docs/engine.md.
"""

import math

import tensorflow as tf

from keras_dp.clipping.forms import Form, PerExample, Product, gram_norms
from keras_dp.clipping.rules.axes import sum_to


def convolution(use, g):
    """Conv1D, Conv2D, Conv3D: z = conv(x, kernel) + bias."""
    layer = use.layer
    a, g = _channels_last(layer, use.input), _channels_last(layer, g)
    if layer._kernel.trainable:
        yield layer._kernel, _kernel_form(layer, a, g)
    if layer.use_bias and layer.bias.trainable:
        yield layer.bias, PerExample(sum_to(g, layer.bias.shape), layer.bias.shape)


def depthwise(use, g):
    """DepthwiseConv: each input channel has kernels of its own."""
    layer = use.layer
    a, g = _channels_last(layer, use.input), _channels_last(layer, g)
    kernel = layer.kernel
    if kernel.trainable:
        channels, multiplier = kernel.shape[-2:]
        padded = _padded(layer, a, g)
        positions = [tf.shape(g)[0], -1, channels, multiplier]
        by_channel = tf.reshape(tf.cast(g, tf.float32), positions)
        offsets = [
            tf.einsum("btc,btcm->bcm", tf.reshape(s, positions[:2] + [channels]), by_channel)
            for s in _shifted(layer, padded, g)
        ]
        yield kernel, PerExample(tf.stack(offsets, 1), kernel.shape)
    if layer.use_bias and layer.bias.trainable:
        yield layer.bias, PerExample(sum_to(g, layer.bias.shape), layer.bias.shape)


class Convolution(Form):
    """The kernel gradients of an ordinary two-dimensional convolution.

    Args:
      a: ``[batch, H, W, C]``; g: ``[batch, Ho, Wo, P]``.
      strides: two ints; padding: "SAME" or "VALID".
      patches: function that gives the patches of a, ``[batch, T, D]``.
      shape: the weight's shape; (1, k, C, P) is meant where it has three dimensions.
    """

    def __init__(self, a, g, strides, padding, patches, shape):
        self.a, self.g = tf.cast(a, tf.float32), tf.cast(g, tf.float32)
        self.strides, self.padding, self.patches = strides, padding, patches
        self.shape = tuple(shape)
        self.filter_shape = [1] * (4 - len(shape)) + list(shape)
        self.gradient = None

    def squared_norms(self):
        """Gram matrices of patches and of g for small images, else the gradients themselves."""
        height, width = self.g.shape[1:3]
        depth, filters = math.prod(self.filter_shape[:3]), self.filter_shape[3]
        positions = None if None in (height, width) else height * width
        # Measured on CPU: below 100 positions the Gram way wins while it does less than
        # about a third of the work of the library's own kernel.
        if positions and positions <= 100 and 2 * positions**2 < 0.35 * depth * filters:
            p = self.patches()
            g = tf.reshape(self.g, [-1, positions, filters])
            return gram_norms(tf.matmul(p, p, transpose_b=True), tf.matmul(g, g, transpose_b=True))
        self.gradient = self.per_example()
        return tf.reduce_sum(tf.square(self.gradient), range(1, self.gradient.shape.rank))

    def tensors(self):
        """The per-example gradient if it was made, else input and output gradient."""
        return [self.a, self.g] if self.gradient is None else [self.gradient]

    def weighted_sum(self, factors, tensors):
        """A contraction, or the library's weight gradient of scaled output gradients."""
        if self.gradient is not None:
            flat = tf.reshape(tensors[0], [-1, math.prod(self.shape)])
            return tf.reshape(tf.matmul(factors[None], flat), self.shape)
        a, g = tensors
        return tf.reshape(self._kernel_gradient(a, g * factors[:, None, None, None]), self.shape)

    def per_example(self):
        """One example at a time through the library's kernel; few channels by patches."""
        if self.gradient is not None:
            return self.gradient
        if self.filter_shape[2] <= 4:
            p, filters = self.patches(), self.filter_shape[3]
            g = tf.reshape(self.g, [tf.shape(self.g)[0], -1, filters])
            gradient = tf.matmul(p, g, transpose_a=True)
        else:
            gradient = tf.map_fn(
                lambda pair: self._kernel_gradient(pair[0][None], pair[1][None]),
                (self.a, self.g),
                fn_output_signature=tf.float32,
                parallel_iterations=1,
            )
        return tf.reshape(gradient, [-1, *self.shape])

    def _kernel_gradient(self, a, g):
        return tf.raw_ops.Conv2DBackpropFilter(
            input=a,
            filter_sizes=self.filter_shape,
            out_backprop=g,
            strides=[1, *self.strides, 1],
            padding=self.padding,
        )


def _kernel_form(layer, a, g):
    shape = layer._kernel.shape
    pointwise = all(k == 1 for k in layer.kernel_size)
    if (
        layer.rank < 3
        and layer.groups == 1
        and not pointwise
        and all(d == 1 for d in layer.dilation_rate)
    ):
        strides, padding = tuple(layer.strides), layer.padding.upper()
        if padding == "CAUSAL":
            a, padding = _padded(layer, a, g), "VALID"
        if layer.rank == 1:
            a, g, strides = a[:, None], g[:, None], (1, *strides)

        def patches():
            if shape[-2] <= 4:
                return _patches_by_convolution(a, shape, strides, padding)
            if shape[-2] < 64:
                return _patches_by_extraction(a, shape, strides, padding)
            source, target = (a[:, 0], g[:, 0]) if layer.rank == 1 else (a, g)
            if layer.padding != "causal":
                source = _padded(layer, source, target)
            return _patches(layer, source, target)[:, 0]

        return Convolution(a, g, strides, padding, patches, shape)
    return _patch_product(layer, _padded(layer, a, g), g)


def _patch_product(layer, padded, g):
    """Patches times output gradient; each group of channels is a block of its own."""
    shape, groups = layer._kernel.shape, layer.groups
    filters = shape[-1] // groups
    by_group = tf.reshape(tf.cast(g, tf.float32), [tf.shape(g)[0], -1, groups, filters])
    by_group = tf.transpose(by_group, [0, 2, 1, 3])
    patches = _patches(layer, padded, g)
    by_group.set_shape(patches.shape[:3] + [filters])

    def to_weight(w):
        lead = w.shape.rank - 3
        w = tf.transpose(w, [*range(lead), lead + 1, lead, lead + 2])
        return tf.reshape(w, tf.concat([tf.shape(w)[:lead], shape], 0))

    return Product(patches, by_group, to_weight, shape)


def _patches(layer, padded, g):
    """``[batch, groups, T, D]``: the inputs of every output position, by strided slices."""
    groups = layer.groups
    channels = padded.shape[-1] // groups
    shifted = [
        tf.reshape(s, [tf.shape(s)[0], -1, groups, channels]) for s in _shifted(layer, padded, g)
    ]
    stacked = tf.transpose(tf.stack(shifted, 2), [0, 3, 1, 2, 4])
    depth = len(shifted) * channels
    result = tf.reshape(stacked, tf.concat([tf.shape(stacked)[:3], [depth]], 0))
    positions = g.shape[1:-1]
    known = None if None in positions else math.prod(positions)
    result.set_shape([g.shape[0], groups, known, depth])
    return result


def _patches_by_convolution(a, shape, strides, padding):
    """The same, ``[batch, T, D]``; for few channels an identity kernel is the fastest way."""
    kernel = [1] * (4 - len(shape)) + list(shape[:-1])
    depth = math.prod(kernel)
    identity = tf.reshape(tf.eye(depth), [*kernel, depth])
    return _as_positions(tf.nn.conv2d(tf.cast(a, tf.float32), identity, strides, padding))


def _patches_by_extraction(a, shape, strides, padding):
    """The same; for a middling number of channels TensorFlow's own operation is."""
    sizes = [1] * (5 - len(shape)) + list(shape[:-2]) + [1]
    a = tf.cast(a, tf.float32)
    return _as_positions(
        tf.image.extract_patches(a, sizes, [1, *strides, 1], [1, 1, 1, 1], padding)
    )


def _as_positions(patches):
    height, width, depth = patches.shape[1:]
    positions = -1 if None in (height, width) else height * width
    return tf.reshape(patches, [tf.shape(patches)[0], positions, depth])


def _shifted(layer, padded, g):
    """The padded input as seen by each kernel offset, ``[batch, *output positions, C]``."""
    sizes = [g.shape[k + 1] or tf.shape(g)[k + 1] for k in range(layer.rank)]
    for offset in _offsets(layer.kernel_size):
        window = [slice(None)]
        for place, dilation, stride, size in zip(offset, layer.dilation_rate, layer.strides, sizes):
            start = place * dilation
            window.append(slice(start, start + (size - 1) * stride + 1, stride))
        yield padded[tuple(window)]


def _offsets(kernel_size):
    if not kernel_size:
        return [()]
    return [(k, *rest) for k in range(kernel_size[0]) for rest in _offsets(kernel_size[1:])]


def _padded(layer, a, g):
    """The input with the zeros that the layer's padding stands for, as float32."""
    a = tf.cast(a, tf.float32)
    if layer.padding == "valid":
        return a
    paddings = [[0, 0]]
    for k in range(layer.rank):
        reach = (layer.kernel_size[k] - 1) * layer.dilation_rate[k]
        if layer.padding == "causal":
            paddings.append([reach, 0])
            continue
        size = a.shape[k + 1] or tf.shape(a)[k + 1]
        steps = g.shape[k + 1] or tf.shape(g)[k + 1]
        missing = (steps - 1) * layer.strides[k] + reach + 1 - size
        total = max(missing, 0) if isinstance(missing, int) else tf.maximum(missing, 0)
        paddings.append([total // 2, total - total // 2])
    return tf.pad(a, [*paddings, [0, 0]])


def _channels_last(layer, tensor):
    if layer.data_format == "channels_last":
        return tensor
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])
