"""Noise from a cryptographic generator: the law, the bits, the grid, and through ``fit``."""

import copy
import os
import pickle
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp import secure_noise
from keras_dp.errors import PrivacyError
from keras_dp.secure_noise import SecureNoise

pytest.importorskip("cryptography")


def _draw(noise, shape=(1000,), stddev=1.0):
    return noise.draw([shape], stddev)[0].numpy().ravel()


def test_draws_are_normal_in_double_precision():
    z = _draw(SecureNoise(), (400_000,), 3.0)
    assert z.dtype == np.float64
    assert abs(z.mean()) < 3 * 5 / np.sqrt(z.size)
    assert abs(z.std() / 3 - 1) < 0.005
    for sigmas, share in ((1, 0.682689), (2, 0.9545), (3, 0.9973), (4, 0.99993666)):
        seen = np.mean(np.abs(z) < 3 * sigmas)
        assert abs(seen - share) < 5 * np.sqrt(share * (1 - share) / z.size)


def test_the_bits_are_aes():
    """E(key 0, block 0) is the hash key H of the AES-GCM test cases 1 and 2 (McGrew and Viega)."""
    words = secure_noise._aes_words(np.zeros(2, np.int64), 0, 4)
    assert words.tobytes()[:16].hex() == "66e94bd4ef8a2c3b884cfa59ca342b2e"
    # The lower half of the counter block counts: the next block is that of counter 1.
    assert words.tobytes()[16:].hex() == "58e2fccefa7e3061367f1d57a4e7455a"


def test_streams_and_sources_are_independent():
    noise = SecureNoise()
    draws = [_draw(noise, (5000,)) for _ in range(3)]
    draws += [z.numpy().ravel() for z in noise.draw([(5000,), (50, 100)], 1.0)]
    draws.append(_draw(SecureNoise(), (5000,)))
    draws.append(_draw(copy.deepcopy(noise), (5000,)))
    draws.append(_draw(pickle.loads(pickle.dumps(noise)), (5000,)))
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(5000)


@pytest.mark.parametrize("stddev", [1e-4, 0.3, 1.0, 2.0, 700.0])
def test_noisy_sums_lie_on_a_grid(stddev):
    """Whatever the low bits of a gradient were, they are not in what is released."""
    grid = 2.0 ** (np.floor(np.log2(stddev)) - 20)
    assert stddev / 2**21 < grid <= stddev / 2**20
    rng = np.random.default_rng(0)
    gradient = tf.constant(rng.normal(size=5000) * stddev / 7, tf.float32)
    (noisy,) = SecureNoise().add([gradient], stddev)
    assert noisy.dtype == tf.float32
    assert np.any(gradient.numpy().astype(np.float64) % grid)
    np.testing.assert_array_equal(noisy.numpy().astype(np.float64) % grid, 0)
    difference = (noisy.numpy().astype(np.float64) - gradient.numpy()).std()
    assert abs(difference / stddev - 1) < 5 / np.sqrt(2 * 5000)


def test_extreme_words_are_finite():
    for radius in (0, 1, 2**64 - 1):
        for angle in (0, 2**63, 2**64 - 1):
            z = secure_noise._box_muller(tf.constant([radius, angle], tf.uint64), 1.0).numpy()
            assert np.isfinite(z).all()
    assert 8.5 < np.hypot(*secure_noise._box_muller(tf.constant([0, 0], tf.uint64), 1.0)) < 8.7


def _model(**kwargs):
    model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(200, use_bias=False)])
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=0.5, noise_multiplier=2.0, batch_size=4, noise_source="secure"
    )
    model.compile(optimizer, "mse", **kwargs)
    return model


def test_an_update_has_the_noise_that_is_accounted():
    model = _model()
    before = model.get_weights()[0].copy()
    model.fit(np.zeros((8, 50)), np.zeros((8, 200)), batch_size=4, verbose=0)
    moved = model.get_weights()[0] - before
    # Two updates of sigma C / batch_size = 0.25 each.
    assert abs(moved.std() / (0.25 * np.sqrt(2)) - 1) < 5 / np.sqrt(2 * moved.size)
    with pytest.warns(UserWarning, match="NOT private"):
        twice = [SecureNoise(seed=1), SecureNoise(seed=1)]
    np.testing.assert_array_equal(*map(_draw, twice))


def test_the_config_keeps_the_source_and_no_secret():
    optimizer = _model().optimizer
    again = keras_dp.DPSGD.from_config(optimizer.get_config())
    assert again.noise_source == "secure" and isinstance(again._noise, SecureNoise)
    assert optimizer._noise._secret.numpy().tobytes() not in pickle.dumps(optimizer.get_config())


def test_xla_is_refused():
    model = _model(jit_compile=True)
    with pytest.raises(PrivacyError, match="jit_compile=False"):
        model.fit(np.zeros((8, 50)), np.zeros((8, 200)), batch_size=4, verbose=0)


def test_a_fork_is_refused(monkeypatch):
    noise, process = SecureNoise(), os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(PrivacyError, match="fork"):
        noise.draw([(3,)], 1.0)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ImportError, match=r"pip install \"keras_dp\[secure\]\""):
        SecureNoise()


def test_another_source_is_refused():
    with pytest.raises(ValueError, match="noise_source must be one of 'fast', 'secure'"):
        keras_dp.DPSGD(
            1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4, noise_source="best"
        )
