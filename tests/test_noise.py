"""The noise source: fresh, independent, never the same twice, never written down."""

import copy
import os
import pickle

import numpy as np
import pytest
import tensorflow as tf

from keras_dp.errors import PrivacyError
from keras_dp.noise import GaussianNoise


def _draw(noise, shape=(1000,), count=1):
    return np.concatenate([np.ravel(z) for z in noise.draw([shape] * count)])


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
    draws += [np.ravel(z) for z in noise.draw([(5000,), (50, 100)])]
    draws += [np.ravel(z) for z in noise.draw([(5000,)])]
    draws.append(_draw(GaussianNoise(), (5000,)))
    for i, a in enumerate(draws):
        for b in draws[:i]:
            assert abs(np.corrcoef(a, b)[0, 1]) < 5 / np.sqrt(5000)


def test_the_same_in_a_function_and_under_xla():
    draws = []
    for jit in (None, False, True):
        with pytest.warns(UserWarning, match="NOT private"):
            noise = GaussianNoise(seed=3)
        run = (lambda n=noise: n.draw([(64,)])[0]) if jit is None else None
        step = run or tf.function(lambda n=noise: n.draw([(64,)])[0], jit_compile=jit)
        draws.append(np.stack([step(), step()]))
    np.testing.assert_array_equal(draws[0], draws[1])
    # XLA turns the same Philox bits into normals by another formula: other numbers, still
    # two independent draws.
    assert np.any(draws[2][0] != draws[2][1])


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
        noise.draw([(3,)])
