"""The noise source: fresh, independent, never the same twice, never written down."""

import copy
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.errors import PrivacyError
from keras_dp.noise import GaussianNoise, _box_muller, _streams


def _draw(noise, shape=(1000,), count=1):
    return np.concatenate([np.ravel(z) for z in noise.draw([shape] * count, 1.0)])


def test_draws_are_standard_normal():
    z = _draw(GaussianNoise(), (400_000,))
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert abs(z.std() - 1) < 0.005
    # Quantiles of the normal distribution.
    for sigmas, share in ((1, 0.682689), (2, 0.9545), (3, 0.9973), (4, 0.99993666)):
        assert abs(np.mean(np.abs(z) < sigmas) - share) < 5 * np.sqrt(share * (1 - share) / z.size)


def test_no_two_tensors_share_noise():
    noise = GaussianNoise()
    draws = [_draw(noise, (5000,)) for _ in range(3)]
    draws += [np.ravel(z) for z in noise.draw([(5000,), (50, 100)], 1.0)]
    draws += [np.ravel(z) for z in noise.draw([(5000,)], 1.0)]
    draws.append(_draw(GaussianNoise(), (5000,)))
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(5000)


def test_the_same_in_a_function_and_under_xla():
    draws = []
    for jit in (None, False, True):
        with pytest.warns(UserWarning, match="NOT private"):
            noise = GaussianNoise(seed=3)
        run = (lambda n=noise: n.draw([(64,)], 1.0)[0]) if jit is None else None
        step = run or tf.function(lambda n=noise: n.draw([(64,)], 1.0)[0], jit_compile=jit)
        draws.append(np.stack([step(), step()]))
    np.testing.assert_array_equal(draws[0], draws[1])
    np.testing.assert_allclose(draws[0], draws[2], atol=1e-5)


def test_pairs_are_independent_normals():
    """The two halves of a stream share their radii: together they must still be a 2D normal."""
    n = 200_000
    x, y = np.split(_draw(GaussianNoise(), (2 * n,)).astype("float64"), 2)
    bound = 5 / np.sqrt(n)
    assert abs(np.mean(x * y)) < bound
    assert abs(np.mean((x**2 - 1) * (y**2 - 1)) / 2) < bound
    assert abs(np.mean(np.sign(x) * np.sign(y))) < bound
    # |(x, y)|^2 / 2 has an exponential distribution.
    for level in (0.1, 1.0, 3.0, 6.0):
        share = np.exp(-level)
        seen = np.mean((x**2 + y**2) / 2 > level)
        assert abs(seen - share) < 5 * np.sqrt(share / n)


def test_extreme_bits():
    """No bits give an infinite or missing number; the tails end where they are said to."""
    lowest, highest = 0, 2**32 - 1
    for radius in (lowest, 1, highest):
        for angle in (lowest, 2**31, highest):
            x, y = _box_muller(tf.constant([radius, angle], tf.uint32), 1.0).numpy()
            assert np.isfinite([x, y]).all()
            want = np.sqrt(max(-2 * np.log((radius + 0.5) / 2**32), 0))
            np.testing.assert_allclose(np.hypot(x, y), want, atol=1e-3)
    assert 6.7 < np.hypot(*_box_muller(tf.constant([0, 0], tf.uint32), 1.0)) < 6.8


def test_small_tensors_share_a_stream_and_large_ones_do_not():
    big = 1 << 20
    assert _streams([3, 4, big, 5, 6]) == [[0, 1], [2], [3, 4]]
    assert _streams([]) == []
    assert _streams([big + 1]) == [[0]]
    sizes = [(0,), (3,), (2, 2), (0,), (), (5,)]
    shapes = [z.shape for z in GaussianNoise().draw(sizes, 2.0)]
    assert [tuple(s) for s in shapes] == sizes


def test_seed_repeats_and_no_seed_does_not():
    with pytest.warns(UserWarning, match="seed=5.*NOT private"):
        first, second = GaussianNoise(seed=5), GaussianNoise(seed=5)
    np.testing.assert_array_equal(_draw(first), _draw(second))
    assert np.all(_draw(GaussianNoise()) != _draw(GaussianNoise()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))])
def test_a_copy_is_a_new_source(duplicate):
    noise = GaussianNoise()
    assert np.all(_draw(duplicate(noise)) != _draw(noise))


def test_the_secret_is_not_written_down():
    noise = GaussianNoise()
    secret = noise._secret.numpy().tobytes()
    assert len(secret) == 16
    assert secret not in pickle.dumps(noise)
    assert secret.hex() not in repr(noise)
    assert str(noise._secret.numpy()[0]) not in repr(noise)


def test_a_forked_process_is_refused(monkeypatch):
    """A fork has the same secret and counter: it would repeat the noise of its parent."""
    noise = GaussianNoise()
    process = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(PrivacyError, match="fork"):
        noise.draw([(3,)], 1.0)
