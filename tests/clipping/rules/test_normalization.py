"""Normalization: the rule computes the layer itself, so its outputs are Keras's too."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp import testing
from keras_dp.clipping import rules
from keras_dp.clipping.rules.rule import Use

L = keras.layers

LAYERS = {
    "layer": (lambda: L.LayerNormalization(), (5, 6)),
    "layer, no positions": (lambda: L.LayerNormalization(), (6,)),
    "layer, two axes": (lambda: L.LayerNormalization(axis=[-2, -1]), (5, 4, 3)),
    "layer, first axis": (lambda: L.LayerNormalization(axis=1), (5, 4, 3)),
    "layer, scale alone": (lambda: L.LayerNormalization(center=False), (5, 6)),
    "layer, offset alone": (lambda: L.LayerNormalization(scale=False), (5, 6)),
    "layer, axes apart": (lambda: L.LayerNormalization(axis=[1, 3]), (3, 4, 5)),
    "layer, rms_scaling": (lambda: L.LayerNormalization(rms_scaling=True), (5, 6)),
    "group": (lambda: L.GroupNormalization(2), (4, 5, 6)),
    "group, each channel": (lambda: L.GroupNormalization(-1), (4, 5, 6)),
    "group, first axis": (lambda: L.GroupNormalization(2, axis=1), (6, 4, 5)),
    "group, middle axis": (lambda: L.GroupNormalization(2, axis=2), (3, 6, 4)),
    "group, no positions": (lambda: L.GroupNormalization(3), (6,)),
    "group, scale alone": (lambda: L.GroupNormalization(2, center=False), (5, 6)),
    "rms": (lambda: L.RMSNormalization(), (5, 6)),
    "rms, first axis": (lambda: L.RMSNormalization(axis=1), (5, 4, 5)),
}
BY_THE_FALLBACK = {"layer, axes apart", "layer, rms_scaling", "rms, first axis"}


def _built(name):
    make, shape = LAYERS[name]
    layer = make()
    layer.build((None, *shape))
    rng = np.random.default_rng(0)
    for weight in layer.weights:
        weight.assign(rng.normal(size=weight.shape))
    return layer, rng.normal(1.5, 2, (3, *shape)).astype(np.float32)


@pytest.mark.parametrize("name", LAYERS)
def test_against_the_loop(name):
    layer, x = _built(name)
    assert (rules.rule_for(layer) is None) == (name in BY_THE_FALLBACK)
    testing.check_rule(layer, x.shape[1:])


@pytest.mark.parametrize("name", sorted(set(LAYERS) - BY_THE_FALLBACK))
@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_outputs_and_input_gradient_are_those_of_keras(name, scale):
    layer, x = _built(name)
    x = tf.constant(scale * x)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        want = layer(x)
        found = rules.rule_for(layer).record(
            Use(layer, layer.trainable_variables, None, (x,), {}), layer.call, lambda t: t
        )
        g = tf.constant(np.random.default_rng(1).normal(size=want.shape), tf.float32)
        sums = tf.reduce_sum(want * g), tf.reduce_sum(found * g)
    np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)
    by_keras, by_rule = (tape.gradient(s, x) for s in sums)
    np.testing.assert_allclose(by_rule, by_keras, rtol=2e-4, atol=2e-5 / scale)


def test_a_scale_of_zero():
    layer, x = _built("group")
    layer.gamma.assign(tf.zeros_like(layer.gamma.value))
    testing.check_rule(layer, x.shape[1:])


@pytest.mark.parametrize("frozen", ["gamma", "beta"])
def test_one_of_both_weights_is_frozen(frozen):
    layer, x = _built("group")
    getattr(layer, frozen).trainable = False
    testing.check_rule(layer, x.shape[1:])


@pytest.mark.parametrize("dtype", ["float64", "mixed_bfloat16"])
def test_in_another_precision(dtype):
    layer = L.GroupNormalization(2, dtype=dtype)
    x = np.random.default_rng(2).normal(size=(3, 4, 6))
    want = layer(x)
    record = rules.rule_for(layer).record
    x = tf.cast(x, layer.compute_dtype)
    found = record(Use(layer, layer.trainable_variables, None, (x,), {}), layer.call, lambda t: t)
    assert found.dtype == want.dtype
    tolerance = 1e-12 if dtype == "float64" else 1e-2
    np.testing.assert_allclose(
        tf.cast(found, tf.float64), tf.cast(want, tf.float64), rtol=tolerance, atol=tolerance
    )


def test_unknown_sizes():
    """Images of any size, channels first."""
    image = keras.Input((6, None, None))
    model = keras.Model(image, L.GroupNormalization(2, axis=1)(image))
    x = np.random.default_rng(3).normal(size=(3, 6, 4, 5)).astype(np.float32)
    y = np.zeros((3, 6, 4, 5), np.float32)
    found = []
    for backend in ("layerwise", "loop"):
        optimizer = keras_dp.DPSGD(
            1.0, l2_norm_clip=0.1, noise_multiplier=0.0, batch_size=3, backend=backend
        )
        model.compile(optimizer, "mse")
        found.append(keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums)
    for ours, plain in zip(*found):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)
