"""Convolutions of one, two and three dimensions: ordinary, transposed, depthwise, separable.

The gradient of a kernel is a product of the input's patches and the output's gradient, summed
over output positions. So it is a :class:`Product`, of patches that are made when they are needed
and not kept.
"""

import math

import tensorflow as tf

from keras_dp.clipping import compilation, shapes
from keras_dp.clipping.forms import Form, PerExample, Product, blocks_between
from keras_dp.clipping.rules.axes import sum_to
from keras_dp.clipping.rules.windows import Windows, spatial_sizes


def convolution(use, g):
    """Conv1D, Conv2D, Conv3D: z = conv(x, kernel) + bias."""
    layer = use.layer
    a, g = channels_last(layer, use.input), channels_last(layer, g)
    if layer._kernel.trainable:
        yield layer._kernel, Convolution(Windows.of(layer), a, g, layer._kernel.shape)
    yield from _bias(layer, g)


def transposed(use, g):
    """Conv1DTranspose, Conv2DTranspose, Conv3DTranspose: z = conv_transpose(x, kernel) + bias.

    The transpose of a convolution from z to x with the same kernel, so the gradient of the kernel
    is that convolution's, with input and output gradient in each other's place.
    """
    layer = use.layer
    x, g = channels_last(layer, use.input), channels_last(layer, g)
    if layer.kernel.trainable:
        yield layer.kernel, Convolution(Windows.of(layer), g, x, layer.kernel.shape)
    yield from _bias(layer, g)


def depthwise(use, g):
    """DepthwiseConv1D, DepthwiseConv2D: each input channel has kernels of its own."""
    layer = use.layer
    a, g = channels_last(layer, use.input), channels_last(layer, g)
    if layer.kernel.trainable:
        yield layer.kernel, _depthwise(Windows.of(layer), a, g, layer.kernel.shape)
    yield from _bias(layer, g)


def separable(use, g):
    """SeparableConv1D, SeparableConv2D: a depthwise convolution, then a pointwise one."""
    layer = use.layer
    a, g = channels_last(layer, use.input), channels_last(layer, g)
    windows = Windows.of(layer)
    into, out_of = layer.pointwise_kernel.shape[-2:]
    pointwise = tf.reshape(tf.cast(layer.pointwise_kernel.value, tf.float32), [into, out_of])
    if layer.pointwise_kernel.trainable:
        between = _depthwise_outputs(layer, windows, a, g)
        yield (
            layer.pointwise_kernel,
            Convolution(_pointwise(windows), between, g, layer.pointwise_kernel.shape),
        )
    if layer.depthwise_kernel.trainable:
        backward = tf.tensordot(tf.cast(g, tf.float32), pointwise, [[-1], [1]])
        yield (
            layer.depthwise_kernel,
            _depthwise(windows, a, backward, layer.depthwise_kernel.shape),
        )
    yield from _bias(layer, g)


# From this many numbers on, patches of one channel cost more than their own kind of product.
_LARGE_WINDOW = 25
# The depthwise kernel uses one core for all channels of one image.
_PIECES = 4
# Patches of more numbers an example than this are made for a quarter of the batch at a time: no
# slower (measured), and they are the largest thing that a step holds.
_LARGE_PATCHES = 1 << 17
# Gradients of single examples are kept for the clipped sum up to this many times the room of the
# layer's input and output gradient. Keeping up to 2.25 times it saves 6 % of a step of ResNet-18
# and of WRN-16-4, and takes 3 % more memory.
_KEPT = 4


class Convolution(Form):
    """The kernel gradients of an ordinary convolution.

    Args:
      windows: the :class:`Windows`.
      a: ``[batch, *sizes, channels]``; g: ``[batch, *positions, filters]``.
      shape: the kernel's shape, ``(*kernel_size, channels / groups, filters)``.
      count: the consecutive images of one unit, int or scalar tensor; batch is units times count.
    """

    makes_much = True

    def __init__(self, windows, a, g, shape, count=1):
        self.windows, self.shape, self.count = windows, tuple(shape), count
        self.a, self.g = tf.cast(a, tf.float32), tf.cast(g, tf.float32)
        self.kept = None

    def squared_norms(self):
        """Those of the product; kept as a product if that has the gradients."""
        if self._has_one_channel():
            found = PerExample(_examples_as_channels(self.windows, self.a, self.g), self.shape)
            self.kept = found.grouped(self.count) if self._has_several_rows else found
            self.way = "examples as channels"
            return self.kept.squared_norms()
        parts, norms = [], []
        for a, g in self._in_pieces():
            with tf.control_dependencies(norms[-1:]):
                parts.append(self.product(a, g))
                norms.append(parts[-1].squared_norms())
        self.way = parts[0].way
        if parts[0].gradient is not None and self._is_worth_keeping():
            self.kept = Product.of_examples(parts)
        return tf.concat(norms, 0) if len(norms) > 1 else norms[0]

    def _is_worth_keeping(self):
        """Whether the gradients take little room beside what they are made of."""
        made_of = [*self.a.shape[1:], *self.g.shape[1:]]
        if None in made_of:
            return False
        room = math.prod(self.a.shape[1:]) + math.prod(self.g.shape[1:])
        return math.prod(self.shape) <= _KEPT * room

    def _in_pieces(self):
        patches = [*spatial_sizes(self.g), *self.windows.kernel_size, self.a.shape[-1]]
        known = all(isinstance(size, int) for size in patches)
        if not known or math.prod(patches) <= _LARGE_PATCHES or not compilation.is_outside_xla():
            return [(self.a, self.g)]
        units = tf.shape(self.a)[0] // self.count
        cuts = [self.count * (units * k // _PIECES) for k in range(_PIECES + 1)]
        return [(self.a[i:j], self.g[i:j]) for i, j in zip(cuts, cuts[1:])]

    def _has_one_channel(self):
        windows = self.windows
        return (
            windows.rank == 2
            and self.shape[2] == 1
            and math.prod(windows.kernel_size) >= _LARGE_WINDOW
            and windows.strides[0] == windows.strides[1]
            and not windows.dilated
            and compilation.is_outside_xla()  # which is slow at it
        )

    @property
    def _has_several_rows(self):
        return not isinstance(self.count, int) or self.count > 1

    def product(self, a, g):
        """The gradients as a :class:`Product` of patches and output gradients."""
        groups, filters = self.windows.groups, self.shape[-1]
        patches = self.windows.patches(a, spatial_sizes(g))
        g = shapes.rows(g, patches.shape[2], groups, filters // groups)
        g = tf.transpose(g, [0, 2, 1, 3]) if groups > 1 else shapes.rows(g, 1, *g.shape[1::2])
        layout = blocks_between(groups, patches.shape[3], filters // groups)
        product = Product(patches, g, self.shape, layout)
        return product.grouped(self.count) if self._has_several_rows else product

    def tensors(self):
        """The per-example gradient if it was made, else input and output gradient."""
        if self.kept is not None:
            return self.kept.tensors()
        if not self._has_several_rows:
            return [self.a, self.g]
        return [self._by_unit(self.a), self._by_unit(self.g)]

    def _by_unit(self, tensor):
        return tf.reshape(tensor, tf.concat([[-1, self.count], tf.shape(tensor)[1:]], 0))

    def weighted_sum(self, factors, tensors):
        """A contraction, or the library's weight gradient of scaled output gradients."""
        if self.kept is not None:
            return self.kept.weighted_sum(factors, tensors)
        a, g = tensors
        if self._has_several_rows:
            a, g = tf.reshape(a, tf.shape(self.a)), tf.reshape(g, tf.shape(self.g))
            a.set_shape(self.a.shape)
            g.set_shape(self.g.shape)
        if self.windows.groups > 1 or self.windows.dilated:
            product = self.product(a, g)
            return product.weighted_sum(factors, [product.a, product.g])
        if self._has_several_rows:
            factors = tf.repeat(factors, self.count)
        return self._library_gradient(a, g * tf.reshape(factors, [-1] + [1] * (g.shape.rank - 1)))

    def _library_gradient(self, a, g):
        windows, padding = self.windows, self.windows.padding.upper()
        if padding == "CAUSAL":
            a, padding = windows.pad(a, spatial_sizes(g)), "VALID"
        if windows.rank == 3:
            gradient = tf.raw_ops.Conv3DBackpropFilterV2(
                input=a,
                filter_sizes=self.shape,
                out_backprop=g,
                strides=[1, *windows.strides, 1],
                padding=padding,
            )
        else:
            flat = windows.rank == 1
            gradient = tf.raw_ops.Conv2DBackpropFilter(
                input=a[:, None] if flat else a,
                filter_sizes=[1, *self.shape] if flat else self.shape,
                out_backprop=g[:, None] if flat else g,
                strides=[1, 1, *windows.strides, 1] if flat else [1, *windows.strides, 1],
                padding=padding,
            )
        return tf.reshape(gradient, self.shape)

    def grouped(self, count):
        """The same images, more of them in a unit."""
        return Convolution(self.windows, self.a, self.g, self.shape, self.count * count)

    def per_example(self):
        """The matrix product of each example."""
        product = self.product(self.a, self.g) if self.kept is None else self.kept
        return product.per_example()


def _examples_as_channels(windows, a, g):
    """The kernel gradients of images with one channel, ``[batch, *kernel_size, 1, filters]``.

    With the examples in the place of channels they are one depthwise convolution's, in which each
    channel has filters of its own. No patches are made.
    """
    size, filters = tf.shape(a)[0], g.shape[-1]
    step = (size + _PIECES - 1) // _PIECES
    pieces = []
    for k in range(_PIECES):
        # The last pieces go over rows a second time rather than to be empty.
        start = tf.minimum(k * step, size - step)
        image = tf.transpose(a[start : start + step], [3, 1, 2, 0])
        backward = tf.transpose(g[start : start + step], [1, 2, 0, 3])
        gradient = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=image,
            filter_sizes=tf.stack([*windows.kernel_size, step, filters]),
            out_backprop=tf.reshape(backward, [1, *spatial_sizes(g), step * filters]),
            strides=[1, *windows.strides, 1],
            padding=windows.padding.upper(),
        )
        pieces.append(tf.transpose(gradient, [2, 0, 1, 3])[k * step - start :])
    return tf.expand_dims(tf.concat(pieces, 0), 3)


def _depthwise(windows, a, g, shape):
    """One small product a channel and offset in the window, summed over positions."""
    channels, multiplier = shape[-2:]
    positions = spatial_sizes(g)
    padded = windows.pad(tf.cast(a, tf.float32), positions)
    pieces = shapes.rows(padded, None, channels)
    g = shapes.rows(tf.cast(g, tf.float32), None, channels, multiplier)
    by_offset = tf.unstack(windows.seen(padded, positions), axis=1)
    offsets = [
        tf.reduce_sum(tf.gather(pieces, numbers, axis=1)[..., None] * g, 1) for numbers in by_offset
    ]
    return PerExample(shapes.rows(tf.stack(offsets, 1), *shape), shape)


def _depthwise_outputs(layer, windows, a, g):
    """What the depthwise half of a separable convolution hands to the pointwise one."""
    a = tf.cast(a, tf.float32)
    kernel = tf.cast(layer.depthwise_kernel.value, tf.float32)
    channels, multiplier = kernel.shape[-2:]
    positions = spatial_sizes(g)
    padded = windows.pad(a, positions)
    pieces = shapes.rows(padded, None, channels)
    weights = tf.reshape(kernel, [-1, channels, multiplier])
    total = tf.add_n(
        [
            tf.gather(pieces, numbers, axis=1)[..., None] * weights[k]
            for k, numbers in enumerate(tf.unstack(windows.seen(padded, positions), axis=1))
        ]
    )
    shape = tf.concat([tf.shape(g)[:-1], [channels * multiplier]], 0)
    outputs = tf.reshape(total, shape)
    outputs.set_shape([*g.shape[:-1], channels * multiplier])
    return outputs


def _pointwise(windows):
    ones = (1,) * windows.rank
    return Windows(ones, ones, ones, "valid")


def _bias(layer, g):
    if layer.use_bias and layer.bias.trainable:
        yield layer.bias, PerExample(sum_to(g, layer.bias.shape), layer.bias.shape)


def channels_last(layer, tensor):
    """``tensor`` with the channels behind the spatial axes, whatever the layer's format is."""
    if layer.data_format == "channels_last":
        return tensor
    return tf.transpose(tensor, [0, *range(2, tensor.shape.rank), 1])
