"""Convolutions: every geometry against the loop, and the windows against the definition."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp import testing
from keras_dp.clipping import compilation
from keras_dp.clipping.rules.convolution import Convolution
from keras_dp.clipping.rules.windows import Windows, spatial_sizes
from tests.fixtures import checks, zoo

GEOMETRIES = {
    "stride above the kernel": (L.Conv2D(2, 2, 3), (7, 8, 2)),
    "uneven": (L.Conv2D(3, (3, 2), (1, 2), padding="same"), (5, 6, 2)),
    "kernel as large as the image": (L.Conv2D(3, 3), (3, 3, 2)),
    "kernel larger than the image": (L.Conv2D(3, 5, padding="same"), (3, 2, 2)),
    "one channel": (L.Conv2D(3, 4, 2, padding="same"), (6, 6, 1)),
    "one channel, large window": (L.Conv2D(3, (5, 6), 2, padding="same"), (7, 8, 1)),
    "pointwise and strided": (L.Conv2D(3, 1, 2), (5, 5, 12)),
    "causal and dilated": (L.Conv1D(3, 3, dilation_rate=2, padding="causal"), (7, 12)),
    "causal by identity": (L.Conv1D(3, 3, padding="causal"), (7, 2)),
    "groups": (L.Conv1D(6, 2, groups=3, padding="same"), (5, 6)),
    "transposed, stride above the kernel": (L.Conv2DTranspose(2, 2, 3), (3, 3, 2)),
    "transposed with output padding": (
        L.Conv1DTranspose(3, 3, 2, padding="same", output_padding=1),
        (4, 2),
    ),
    "depthwise": (L.DepthwiseConv2D((2, 3), 2, padding="same", depth_multiplier=3), (5, 4, 2)),
    "separable": (L.SeparableConv2D(3, (3, 2), padding="same", depth_multiplier=2), (4, 5, 2)),
}


@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries(name):
    layer, shape = GEOMETRIES[name]
    testing.check_rule(layer, shape)


@pytest.mark.parametrize("frozen", ["depthwise_kernel", "pointwise_kernel", "bias"])
def test_frozen_parts(frozen):
    layer = L.SeparableConv1D(3, 2)
    layer.build((None, 5, 2))
    getattr(layer, frozen).trainable = False
    testing.check_rule(layer, (5, 2))


@pytest.mark.parametrize("channels", [1, 3, 12])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize("kernel, stride, dilation", [(2, 1, 1), (3, 2, 1), (2, 1, 2), (2, 3, 1)])
def test_patches_are_what_the_convolution_sees(channels, padding, kernel, stride, dilation):
    """conv(x, K) = patches @ K, also where the sizes are known only when it runs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 6, 7, channels)).astype("float32")
    weights = rng.normal(size=(kernel, kernel, channels, 4)).astype("float32")
    want = tf.nn.convolution(x, weights, stride, padding.upper(), dilations=dilation)
    windows = Windows((kernel,) * 2, (stride,) * 2, (dilation,) * 2, padding)

    def patches(x):
        return windows.patches(x, spatial_sizes(want))

    unknown = tf.function(
        patches, input_signature=[tf.TensorSpec([None, None, None, channels])], autograph=False
    )
    for seen in (patches(tf.constant(x)), unknown(x)):
        got = tf.reshape(seen[:, 0] @ weights.reshape(-1, 4), want.shape)
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 8, 9, 16])
def test_one_channel_in_pieces(batch):
    """Every row of a batch of any size is there once, in its place."""
    rng = np.random.default_rng(0)
    a = rng.normal(size=(batch, 6, 7, 1)).astype("float32")
    g = rng.normal(size=(batch, 2, 3, 2)).astype("float32")
    windows = Windows((5, 5), (1, 1), (1, 1), "valid")
    form = Convolution(windows, a, g, (5, 5, 1, 2))
    with compilation.outside_xla(True):
        norms = form.squared_norms()
    assert form.way == "examples as channels"
    want = [
        tf.raw_ops.Conv2DBackpropFilter(
            input=a[i : i + 1],
            filter_sizes=[5, 5, 1, 2],
            out_backprop=g[i : i + 1],
            strides=[1, 1, 1, 1],
            padding="VALID",
        )
        for i in range(batch)
    ]
    np.testing.assert_allclose(form.per_example(), np.stack(want), atol=1e-4)
    np.testing.assert_allclose(norms, np.sum(np.square(want), (1, 2, 3, 4)), rtol=1e-4)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_one_channel_in_fit(jit_compile):
    """The update of a whole step equals the loop's, whichever way its norms are found."""
    model = zoo.build("conv2d_one_channel")
    x, y = zoo.batch(model)
    norms, want = checks.plain_loop(model, x, y, 1.0)
    clip = float(np.median(norms))
    _, want = checks.plain_loop(model, x, y, clip)
    optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=clip, noise_multiplier=0.0, batch_size=1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, jit_compile=jit_compile)
    before = model.get_weights()
    model.fit(x, y, batch_size=len(x), verbose=0, shuffle=False)
    moved = [b - a for a, b in zip(model.get_weights(), before)]
    checks.assert_sums_close(moved, want)
