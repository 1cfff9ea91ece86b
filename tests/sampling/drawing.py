"""Samplers whose batches tell which examples were drawn."""

import numpy as np
import pytest

from keras_dp.sampling import PoissonSampler

NEGATIVE_ZERO = np.float32(-0.0).view(np.int32)


def seeded(*args, seed=0, **kwargs):
    with pytest.warns(UserWarning, match="fixed seed"):
        return PoissonSampler(*args, seed=seed, **kwargs)


def is_padding(weight):
    return np.asarray(weight, np.float32).view(np.int32) == NEGATIVE_ZERO


def drawn(batch):
    """The examples in a batch of a sampler whose x is arange(N)."""
    x, _, weight = batch
    return tuple(np.asarray(x)[~is_padding(weight)].tolist())


def numbered(n=1000, batch_size=100, **kwargs):
    return PoissonSampler(np.arange(n), np.zeros(n), batch_size=batch_size, **kwargs)


def assert_frequency(observed, expected, draws):
    """Within five standard deviations of a binomial frequency, everywhere."""
    bound = 5 * np.sqrt(expected * (1 - expected) / draws)
    assert np.all(np.abs(observed - expected) < bound), (observed, expected, bound)
