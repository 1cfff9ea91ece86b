"""RDP of one release against independent computations of it."""

import decimal
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import rdp as dp_accounting_rdp
from scipy import integrate, stats

from keras_dp import renyi


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def sampled(q, sigma):
    return dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))


def integer_order(q, sigma, order):
    """Mironov, Talwar, Zhang 2019 (arXiv 1908.10530), section 3.3, in 80 digits:

    A = sum over k of binom(a, k) (1 - q)^(a - k) q^k exp(k (k - 1) / (2 sigma^2)).
    """
    with decimal.localcontext(decimal.Context(prec=80)):
        q, sigma = decimal.Decimal(q), decimal.Decimal(sigma)
        a = sum(
            math.comb(order, k)
            * (1 - q) ** (order - k)
            * q**k
            * (decimal.Decimal(k * (k - 1)) / (2 * sigma * sigma)).exp()
            for k in range(order + 1)
        )
        return float(a.ln()) / (order - 1)


def any_order(q, sigma, order):
    """The definition, E[(ratio of mixture to base)^a] under the base, by adaptive quadrature."""
    base, shifted = stats.norm(0, sigma), stats.norm(1, sigma)

    def integrand(z):
        mixture = (1 - q) * base.pdf(z) + q * shifted.pdf(z)
        return mixture**order * base.pdf(z) ** (1 - order)

    edges = np.linspace(-9 * sigma, order + 9 * sigma, 25)
    pieces = [
        integrate.quad(integrand, a, b, epsabs=1e-14, epsrel=1e-11)[0]
        for a, b in zip(edges, edges[1:])
    ]
    return math.log(math.fsum(pieces)) / (order - 1)


@pytest.mark.parametrize("q", [1e-6, 0.004, 0.3, 0.99])
@pytest.mark.parametrize("sigma", [0.3, 1.1, 20.0, 1e4])
def test_integer_orders_equal_the_closed_form(q, sigma):
    orders = [2, 3, 11, 63, 128]
    rdp = dict(zip(renyi.ORDERS, renyi.divergences(sampled(q, sigma))))
    expected = [integer_order(q, sigma, order) for order in orders]
    np.testing.assert_allclose([rdp[order] for order in orders], expected, rtol=1e-8)


@pytest.mark.parametrize("q", [0.004, 0.3, 0.9])
@pytest.mark.parametrize("sigma", [0.5, 1.1, 3.0])
def test_integral_equals_the_definition(q, sigma):
    orders = [1.005, 1.05, 1.1, 1.9, 3.6]
    found = [renyi.sampled_gaussian_divergence(q, sigma, order) for order in orders]
    expected = [any_order(q, sigma, order) for order in orders]
    np.testing.assert_allclose(found, expected, rtol=1e-7)


@pytest.mark.parametrize("q, sigma", [(1e-8, 3.0), (1e-3, 1e5), (1e-20, 1e9), (0.5, 1e9)])
@pytest.mark.parametrize("order", [1.1, 1.5, 2.0, 7.3, 30.0])
def test_small_divergences_do_not_cancel(q, sigma, order):
    """A = 1 + a (a - 1) / 2 q^2 (exp(1 / sigma^2) - 1) + higher powers of q / sigma."""
    leading = order / 2 * q * q * math.expm1(1 / sigma**2)
    found = renyi.sampled_gaussian_divergence(q, sigma, order)
    assert found == pytest.approx(leading, rel=1e-3)


@pytest.mark.parametrize("q", [1e-6, 0.01, 0.5])
@pytest.mark.parametrize("sigma, most_order", [(0.0499, 63), (0.00999, 1.1)])
def test_closed_form_for_little_noise_is_a_tight_upper_bound(q, sigma, most_order):
    bound = renyi.divergences(sampled(q, sigma))
    orders = renyi.ORDERS <= most_order
    exact = [renyi.sampled_gaussian_divergence(q, sigma, order) for order in renyi.ORDERS[orders]]
    assert np.all(bound[orders] >= np.array(exact) * (1 - 1e-12))
    np.testing.assert_allclose(bound[orders], exact, rtol=1e-3)


@pytest.mark.parametrize("q", [1e-4, 0.08, 0.5, 0.97])
@pytest.mark.parametrize("sigma", [0.1, 0.6, 3.0, 9.99, 30.0])
def test_between_the_exact_divergence_and_that_of_dp_accounting(q, sigma):
    rdp = renyi.divergences(sampled(q, sigma))
    small = renyi.ORDERS <= 64
    exact = [renyi.sampled_gaussian_divergence(q, sigma, order) for order in renyi.ORDERS[small]]
    assert np.all(rdp[small] >= np.array(exact) * (1 - 1e-8))
    accountant = dp_accounting_rdp.RdpAccountant().compose(sampled(q, sigma))
    by_dp_accounting = accountant.rdp + 1e-10 / (accountant.orders - 1)  # its rounding errors
    assert np.all(rdp[np.isin(renyi.ORDERS, accountant.orders)] <= by_dp_accounting * (1 + 1e-8))


def test_full_batch_gaussian():
    rdp = renyi.divergences(dp_accounting.GaussianDpEvent(1.7))
    np.testing.assert_allclose(rdp, renyi.ORDERS / (2 * 1.7**2), rtol=1e-12)


def test_no_noise_is_infinite():
    assert np.all(np.isinf(renyi.divergences(dp_accounting.NonPrivateDpEvent())))
    assert renyi.epsilon_of(np.full(len(renyi.ORDERS), np.inf), 1e-5) == math.inf


def test_results_cannot_be_changed_by_a_caller():
    with pytest.raises(ValueError, match="read-only"):
        renyi.divergences(dp_accounting.GaussianDpEvent(1.0))[0] = 0.0
    with pytest.raises(ValueError, match="read-only"):
        renyi.ORDERS[0] = 1.0


def test_orders_are_those_of_dp_accounting_and_smaller_and_larger_ones():
    default = dp_accounting_rdp.RdpAccountant().orders
    assert set(default) < set(renyi.ORDERS)
    assert np.all(np.diff(renyi.ORDERS) > 0)
    assert renyi.ORDERS[0] < default[0] and renyi.ORDERS[-1] > default[-1]
    assert renyi.ORDERS[0] > 1


def test_conversion_equals_that_of_dp_accounting():
    rdp = renyi.divergences(sampled(0.01, 1.0)) * 1000
    expected, _ = dp_accounting_rdp.compute_epsilon(renyi.ORDERS, rdp, 1e-5)
    assert renyi.epsilon_of(rdp, 1e-5) == pytest.approx(expected, rel=1e-12)


def test_zero_is_never_returned():
    assert renyi.epsilon_of(np.full(len(renyi.ORDERS), 1e-300), 0.5) == renyi.LEAST_EPSILON > 0
