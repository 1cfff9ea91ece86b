"""LIN over optimizers, backends, clip norms, microbatches and the ways into Keras."""

import keras
import numpy as np
import pytest

import keras_dp
from tests.fixtures import checks


def _sgd(**kwargs):
    args = dict(l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=2) | kwargs
    return keras_dp.DPSGD(1.0, **args)


@pytest.mark.parametrize("backend", ["auto", "layerwise", "vectorized", "loop"])
@pytest.mark.parametrize("entry", checks.ENTRY_POINTS)
def test_entry_points(entry, backend):
    checks.check_lin(_sgd(backend=backend), checks.ENTRY_POINTS[entry])


@pytest.mark.parametrize("microbatch_size", [1, 2, 3])
@pytest.mark.parametrize(
    "compile_args",
    [{}, {"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}],
    ids=str,
)
def test_compile_arguments(compile_args, microbatch_size):
    checks.check_lin(_sgd(microbatch_size=microbatch_size), **compile_args)
    checks.check_lin(_sgd(), **compile_args)


@pytest.mark.parametrize("clipping", ["flat", "automatic"])
@pytest.mark.parametrize("backend", ["layerwise", "vectorized", "loop"])
@pytest.mark.parametrize("clip", [0.1, 1.0, 10.0])
def test_clip_norm_counts(clip, backend, clipping):
    """x = (30, 40): the weight moves by C (0.6, 0.8) whatever C is."""
    model = checks.linear_model(
        _sgd(l2_norm_clip=clip, batch_size=1, backend=backend, clipping=clipping)
    )
    checks.fit(model, np.array([[30.0, 40.0]], "float32"), np.ones((1, 1), "float32"))
    scale = clip if clipping == "flat" else clip * 50 / 50.01
    np.testing.assert_allclose(
        model.get_weights()[0].ravel(), [-0.6 * scale, -0.8 * scale], rtol=1e-5
    )


@pytest.mark.parametrize("batch_size", [1, 2, 16])
def test_divisor_is_the_constant(batch_size):
    model = checks.linear_model(_sgd(batch_size=batch_size))
    checks.fit(model, checks.LIN_X, checks.LIN_Y)
    np.testing.assert_allclose(
        model.get_weights()[0].ravel(), -checks.LIN_STEP * 2 / batch_size, atol=1e-6
    )


def test_microbatches_leak_nothing():
    """One gradient of norm 1e6 among eight, two rows a pass: the exact clipped mean."""
    x = np.tile(np.float32([[0.3, 0.4]]), (8, 1))
    x[5] = [6e5, 8e5]
    model = checks.linear_model(_sgd(batch_size=8, microbatch_size=2))
    checks.fit(model, x, np.ones((8, 1), "float32"))
    want = -(7 * np.array([0.3, 0.4]) + [0.6, 0.8]) / 8
    np.testing.assert_allclose(model.get_weights()[0].ravel(), want, atol=1e-6)


def test_last_partial_batch():
    """100 examples in batches of 32: four updates, the tail divided by 32 all the same."""
    model = checks.linear_model(_sgd(batch_size=32))
    x = np.tile(np.float32([[3, 4]]), (100, 1))
    model.fit(x, np.ones((100, 1), "float32"), batch_size=32, verbose=0)
    assert int(model.optimizer.iterations) == 4
    np.testing.assert_allclose(
        model.get_weights()[0].ravel(), np.array([-0.6, -0.8]) * (3 + 4 / 32), rtol=1e-5
    )


def test_zero_gradient_is_no_nan():
    model = checks.linear_model(_sgd())
    checks.fit(model, np.zeros((2, 2), "float32"), checks.LIN_Y)
    np.testing.assert_array_equal(model.get_weights()[0], 0)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision(policy):
    """C is in unscaled units; Keras wraps the optimizer of a float16 model."""
    keras.config.set_dtype_policy(policy)
    try:
        optimizer = _sgd()
        model = checks.linear_model(optimizer)
        checks.fit(model, checks.LIN_X, checks.LIN_Y)
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(model.get_weights()[0].ravel(), -checks.LIN_STEP, atol=1e-3)
    assert int(optimizer.iterations) == 1


@pytest.mark.parametrize("value, clip", [(1e-4, 0.01), (300.0, 0.01)])
def test_float16_norms_are_taken_in_float32(value, clip):
    """Squares of 1e-4 vanish and of 300 overflow in float16; both end at norm C."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential(
            [
                keras.Input((1000,)),
                keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
            ]
        )
        model.compile(_sgd(l2_norm_clip=clip, batch_size=1), loss=lambda y, p: y * p)
        checks.fit(model, np.full((1, 1000), value, "float32"), np.ones((1, 1), "float32"))
    finally:
        keras.config.set_dtype_policy("float32")
    norm = np.linalg.norm(model.get_weights()[0])
    want = min(clip, value * np.sqrt(1000))
    np.testing.assert_allclose(norm, want, rtol=2e-3)


# Each row's gradient is its x: with two rows a user, LIN's is the mean of both, (1.5, 2.25).
USER_STEP = np.array([1.5, 2.25]) / np.hypot(1.5, 2.25) / 2


@pytest.mark.parametrize("backend", ["layerwise", "vectorized", "loop"])
@pytest.mark.parametrize("entry", checks.ENTRY_POINTS)
def test_a_user_is_clipped_once(entry, backend):
    model = checks.linear_model(_sgd(backend=backend, examples_per_user=2))
    checks.ENTRY_POINTS[entry](model, checks.LIN_X, checks.LIN_Y)
    np.testing.assert_allclose(model.get_weights()[0].ravel(), -USER_STEP, atol=2e-6)
    assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize(
    "compile_args", [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 2}]
)
@pytest.mark.parametrize("unit", [{"augmentations": 3}, {"examples_per_user": 1}], ids=str)
def test_copies_that_are_alike_change_nothing(unit, compile_args):
    checks.check_lin(_sgd(**unit), **compile_args)
    checks.check_lin(_sgd(microbatch_size=1, **unit), **compile_args)


def test_all_at_once():
    """Two users a batch of two rows, in parts of one user, two copies each, five batches."""
    model = checks.linear_model(
        _sgd(
            batch_size=4,
            examples_per_user=2,
            augmentations=2,
            gradient_accumulation_steps=2,
            microbatch_size=1,
        )
    )
    x, y = np.tile(checks.LIN_X, (10, 1)), np.tile(checks.LIN_Y, (10, 1))
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False)
    assert int(model.optimizer.iterations) == 2
    np.testing.assert_allclose(model.get_weights()[0].ravel(), -4 * USER_STEP, atol=1e-5)
