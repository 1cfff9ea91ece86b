"""What is accounted against the mechanism itself, where all draws can be listed.

A scheme draws from a few gradients of one dimension and norm 1; its output is the sum of those
drawn plus Gaussian noise. Listing every draw gives the density exactly, for two neighbouring data
sets, and from it the Renyi divergence in both directions, which must not exceed what
renyi.divergences says.
"""

import itertools
import math

import numpy as np
import pytest
from scipy import special, stats

from keras_dp import renyi
from keras_dp.accounting import Phase
from keras_dp.accounting.groups import _group_event
from tests.accounting.runs import needs_truncation

ORDERS = [1.1, 2.0, 5.0, 20.0]


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def poisson(gradients, q, capacity=None):
    """Probabilities of the sums of Poisson draws, cut at random to a capacity."""
    sums = {}
    for drawn in itertools.product([0, 1], repeat=len(gradients)):
        probability = q ** sum(drawn) * (1 - q) ** (len(drawn) - sum(drawn))
        chosen = [g for g, d in zip(gradients, drawn) if d]
        size = len(chosen) if capacity is None else min(capacity, len(chosen))
        parts = list(itertools.combinations(chosen, size))
        for part in parts:
            sums[sum(part)] = sums.get(sum(part), 0) + probability / len(parts)
    return sums


def without_replacement(gradients, size):
    """Probabilities of the sums of draws of a fixed size."""
    parts = list(itertools.combinations(gradients, size))
    sums = {}
    for part in parts:
        sums[sum(part)] = sums.get(sum(part), 0) + 1 / len(parts)
    return sums


def divergence(sums, others, sigma, order):
    """Renyi divergence between two noisy sums, by the trapezoidal rule."""
    step = min(sigma, sigma**2) / 50
    z = np.arange(-8 - 14 * sigma, 8 + 14 * sigma + order * 8, step)
    z = np.concatenate([-z[::-1], z])  # where the mass of the integrand lies depends on the signs
    z = np.unique(z)

    def log_density(mixture):
        parts = [math.log(p) + stats.norm.logpdf(z, s, sigma) for s, p in mixture.items() if p > 0]
        return special.logsumexp(parts, axis=0)

    integrand = order * log_density(sums) + (1 - order) * log_density(others)
    widths = np.gradient(z)
    return special.logsumexp(integrand, b=widths) / (order - 1)


def assert_bounded(event, replace_one, pairs, sigma):
    """Returns the largest share of the bound that a pair reaches at each order."""
    rdp = dict(zip(renyi.ORDERS, renyi.divergences(event, replace_one)))
    shares = []
    for order in ORDERS:
        found = max(
            max(divergence(a, b, sigma, order), divergence(b, a, sigma, order)) for a, b in pairs
        )
        assert found <= rdp[order] * (1 + 1e-6)
        shares.append(found / rdp[order])
    return shares


def phase(num_examples, batch_size, sigma, **more):
    return Phase(num_examples=num_examples, batch_size=batch_size, noise_multiplier=sigma, **more)


OTHERS = [(), (1, 1, 1), (1, -1, 1), (-1, -1, -1)]


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sigma", [0.6, 2.0])
def test_poisson_add_remove(batch_size, sigma):
    q = batch_size / 4
    pairs = [(poisson((*o, x), q), poisson(o, q)) for o in OTHERS for x in (1, -1)]
    release = phase(4, batch_size, sigma).release
    shares = assert_bounded(release, False, pairs, sigma)
    assert shares == pytest.approx([1] * len(ORDERS), rel=1e-5)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("sigma", [0.6, 2.0])
def test_poisson_replace_one(batch_size, sigma):
    q = batch_size / 4
    pairs = [
        (poisson((*o, x), q), poisson((*o, y), q))
        for o in OTHERS
        for x, y in [(1, -1), (1, 0), (0.5, -1)]
    ]
    release = phase(4, batch_size, sigma, neighboring_relation="replace_one").release
    shares = assert_bounded(release, True, pairs, sigma)
    assert shares == pytest.approx([1] * len(ORDERS), rel=1e-5)


@pytest.mark.parametrize("q, sigma", [(0.1, 0.7), (0.5, 1.0), (0.9, 2.0)])
def test_opposite_gradients_are_the_worst_replacement(q, sigma):
    """Gradients have many dimensions: two that differ lie in a plane, at any angle."""
    rdp = dict(zip(renyi.ORDERS, renyi.divergences(sampled(q, sigma), True)))
    z = np.arange(-1 - 9 * sigma, 9 + 9 * sigma, sigma / 8)
    x, y = np.meshgrid(z, np.arange(-1 - 9 * sigma, 9 + 9 * sigma, sigma / 8))

    def log_mixture(at_x, at_y):
        def log_normal(a, b):
            return -((x - a) ** 2 + (y - b) ** 2) / (2 * sigma**2)

        return np.logaddexp(math.log1p(-q) + log_normal(0, 0), math.log(q) + log_normal(at_x, at_y))

    scale = 2 * math.log(sigma / 8) - math.log(2 * math.pi * sigma**2)
    for degrees in (30, 90, 150, 180):
        angle = math.radians(degrees)
        one, other = log_mixture(1, 0), log_mixture(math.cos(angle), math.sin(angle))
        for order in (2.0, 4.0):
            found = special.logsumexp(order * one + (1 - order) * other) + scale
            bound = rdp[order] * (order - 1)
            assert found <= bound * (1 + 1e-6)
            if degrees == 180:
                assert found == pytest.approx(bound, rel=1e-6)


def sampled(q, sigma):
    return phase(1000, int(1000 * q), sigma).release


@needs_truncation
@pytest.mark.parametrize("relation", ["add_remove", "replace_one"])
@pytest.mark.parametrize("batch_size, capacity", [(1, 1), (2, 2), (3, 2), (4, 3), (3, 3)])
def test_truncated_poisson(relation, batch_size, capacity):
    sigma, q = 1.0, batch_size / 4
    release = phase(4, batch_size, sigma, capacity=capacity, neighboring_relation=relation).release
    if relation == "add_remove":
        changes = [((1,), ()), ((-1,), ())]
    else:
        changes = [((1,), (-1,))]
    pairs = [
        (poisson((*o, *x), q, capacity), poisson((*o, *y), q, capacity))
        for o in OTHERS[1:]
        for x, y in changes
    ]
    assert_bounded(release, relation == "replace_one", pairs, sigma)


def test_cutting_draws_can_cost_more_than_not_cutting():
    """So a capacity that cuts must not be accounted as plain Poisson sampling."""
    q, sigma, others = 1 / 2, 1.0, (-1, -1, -1)
    cut = divergence(poisson((*others, 1), q, 1), poisson(others, q, 1), sigma, 5.0)
    plain = dict(zip(renyi.ORDERS, renyi.divergences(phase(4, 2, sigma).release)))[5.0]
    assert cut > plain * 1.1


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("sigma", [0.7, 2.0])
def test_without_replacement(batch_size, sigma):
    release = phase(4, batch_size, sigma, sampling="without_replacement").release
    pairs = [
        (without_replacement((*o, 1), batch_size), without_replacement((*o, -1), batch_size))
        for o in OTHERS[1:]
    ]
    assert_bounded(release, True, pairs, sigma)


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_groups_under_poisson_sampling(group_size, batch_size):
    sigma, q = 1.5, batch_size / 4
    event = _group_event(phase(4, batch_size, sigma).release, group_size, False)
    group = (1,) * group_size
    pairs = [(poisson((*o, *group), q), poisson(o, q)) for o in ((), (1, -1))]
    mixed = tuple((-1) ** i for i in range(group_size))
    pairs.append((poisson(mixed, q), poisson((), q)))
    shares = assert_bounded(event, False, pairs, sigma)
    assert shares == pytest.approx([1] * len(ORDERS), rel=1e-5)
