"""Weight standardisation: the formula, and that private training sees every example's gradient."""

import keras
import numpy as np

import keras_dp
import models
from keras_dp import testing


def test_the_kernel_is_standardised():
    """By NumPy: mean 0 and norm gain in every filter; a constant filter stays finite."""
    layer = models.StandardizedConv2D(3, 2, use_bias=False)
    x = np.random.default_rng(0).normal(size=(2, 5, 5, 4)).astype(np.float32)
    layer(x)
    kernel = np.random.default_rng(1).normal(1.0, 2.0, layer.kernel.shape).astype(np.float32)
    kernel[..., 2] = 0.7
    layer.kernel.assign(kernel)
    layer.gain.assign([1.0, 2.0, 3.0])
    centred = kernel - kernel.mean((0, 1, 2))
    expected = centred / np.sqrt(np.maximum((centred**2).sum((0, 1, 2)), 1e-4)) * [1, 2, 3]
    used = np.asarray(layer.standardized(layer.kernel))
    np.testing.assert_allclose(used, expected, atol=1e-5)
    plain = keras.layers.Conv2D(3, 2, use_bias=False)
    plain(x)
    plain.kernel.assign(expected)
    np.testing.assert_allclose(layer(x), plain(x), atol=1e-4)


def test_gradients_of_single_examples():
    testing.check_rule(models.StandardizedConv2D(3, 3, strides=2, padding="same"), (6, 6, 2))


def test_a_standardised_network_trains_layerwise_as_a_loop_does():
    model = models.wide_resnet(
        (8, 8, 3), 3, depth=10, width=1, groups=4, weight_standardization=True
    )
    assert keras_dp.validate(model) == []
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 8, 8, 3)).astype(np.float32)
    y = np.arange(4) % 3
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    clipped = {}
    for backend in ("layerwise", "loop"):
        optimizer = keras_dp.DPSGD(
            1.0, l2_norm_clip=0.5, noise_multiplier=0.0, batch_size=4, backend=backend
        )
        before = model.get_weights()
        model.compile(optimizer, loss)
        model.train_on_batch(x, y)
        clipped[backend] = [b - a for a, b in zip(model.get_weights(), before)]
        model.set_weights(before)
    for layerwise, loop in zip(clipped["layerwise"], clipped["loop"]):
        np.testing.assert_allclose(layerwise, loop, atol=2e-5)
    assert 0.01 < np.sqrt(sum((g**2).sum() for g in clipped["loop"])) <= 0.5
