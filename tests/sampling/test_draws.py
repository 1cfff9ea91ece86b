"""The law of the draws."""

import numpy as np
import pytest
from scipy.stats import binom

from keras_dp import sampling
from keras_dp.sampling import default_capacity, poisson_indices
from tests.sampling.drawing import assert_frequency, seeded


@pytest.fixture(scope="module")
def membership():
    """100,000 draws of N=10 with q=0.3 in the order of `fit`: bool [draws, examples]."""
    sampler = seeded(np.arange(10), batch_size=3, steps_per_epoch=4)
    member = np.zeros((100_000, 10), bool)
    for step in range(len(member)):
        x, _, weight = sampler[step % 4]
        member[step, x[weight == 1]] = True
    return member


def test_each_example_is_drawn_with_probability_q(membership):
    assert_frequency(membership.mean(0), 0.3, len(membership))


def test_pairs_of_examples_are_independent(membership):
    both = (membership.T.astype(float) @ membership) / len(membership)
    assert_frequency(both[~np.eye(10, dtype=bool)], 0.09, len(membership))


def test_sizes_are_binomial(membership):
    sizes = membership.sum(1)
    # Var(s^2) = (mu_4 - sigma^4) / draws, with mu_4 of Binomial(10, 0.3) = 12.684.
    assert abs(sizes.var() - 10 * 0.3 * 0.7) < 5 * np.sqrt((12.684 - 2.1**2) / len(sizes))
    observed = np.bincount(sizes, minlength=11) / len(sizes)
    assert_frequency(observed, binom.pmf(np.arange(11), 10, 0.3), len(sizes))


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 5, 8])
def test_draws_of_different_steps_are_independent(membership, lag):
    earlier, later = membership[:-lag].astype(float), membership[lag:]
    assert_frequency(earlier.T @ later / len(later), 0.09, len(later))


def test_law_on_a_large_data_set():
    n, q, draws = 100_000_000, 2e-5, 2000
    generator = np.random.Generator(np.random.Philox(key=5))
    samples = [poisson_indices(generator, n, q) for _ in range(draws)]
    sizes = np.array([len(s) for s in samples])
    assert abs(sizes.mean() - n * q) < 5 * np.sqrt(n * q / draws)
    assert abs(sizes.var() / (n * q * (1 - q)) - 1) < 5 * np.sqrt(2 / draws)
    tenths = np.bincount(np.concatenate(samples) * 10 // n, minlength=10)
    assert np.all(np.abs(tenths - n * q * draws / 10) < 5 * np.sqrt(n * q * draws / 10))


def test_indices_are_distinct_rising_and_int64():
    generator = np.random.Generator(np.random.Philox(key=6))
    for n, q in [(1, 1.0), (7, 0.5), (1000, 0.9), (10**9, 1e-6)]:
        indices = poisson_indices(generator, n, q)
        assert indices.dtype == np.int64 and indices.ndim == 1
        assert np.all(np.diff(indices) > 0) and np.all((0 <= indices) & (indices < n))


def test_a_draw_far_above_its_mean_is_complete():
    class EveryExample:
        def geometric(self, probability, size):
            return np.ones(size, np.int64)

    assert np.array_equal(poisson_indices(EveryExample(), 5000, 0.01), np.arange(5000))


@pytest.mark.parametrize("n", [1, 10, 1000, 60_000, 10**8])
@pytest.mark.parametrize("batch_size", [1, 7, 256, 1000])
def test_default_capacity_is_the_smallest_multiple_of_8(n, batch_size):
    q = min(batch_size, n) / n
    capacity = default_capacity(n, q)
    assert binom.sf(capacity, n, q) <= sampling.OVERFLOW_PROBABILITY and capacity <= n
    if capacity < n:
        assert capacity % 8 == 0 and binom.sf(capacity - 8, n, q) > sampling.OVERFLOW_PROBABILITY
    else:
        assert binom.sf(n - n % 8 - 8 * (n % 8 == 0), n, q) > sampling.OVERFLOW_PROBABILITY
