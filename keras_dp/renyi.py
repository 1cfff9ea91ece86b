"""Renyi differential privacy (RDP) of one noisy release, and from RDP to epsilon.

The events are those of dp-accounting, and so is the accountant that reads them. For the
Poisson-sampled Gaussian its numbers are exact at integer orders and a close upper bound
at most others, but not everywhere, measured with versions 0.5.0 and 0.6.0:

* At fractional orders it adds the absolute values of an alternating series: below order 2
  that is up to thousands of times too large, and for many settings it does not converge.
* Where the divergence is small (much noise, a small sampling probability) it cancels: the
  result is rounding error, sometimes negative, from which epsilon 0 is derived.
* Below a noise multiplier of about 1e-153 it returns NaN, from which epsilon 0 is derived.

There the divergence is integrated here instead, without cancellation.
"""

import contextlib
import functools
import math

import absl.logging
import dp_accounting
import numpy as np
from dp_accounting import rdp as dp_accounting_rdp
from scipy import special

_LARGE_ORDERS = [2048, 4096, 8192, 16384]  # the best ones when epsilon is below 0.02
ORDERS = np.append(dp_accounting_rdp.RdpAccountant().orders, _LARGE_ORDERS)
ORDERS.flags.writeable = False

# With less noise than this sampling hides next to nothing; a closed form is then as good
# as the integral, whose grid would grow with 1 / noise_multiplier**2.
_CLOSED_FORM_BELOW = 0.05
# With more noise than this, the accountant's fractional orders are too large to be the best.
_INTEGRATED_FROM = 10.0
# log(A) under this is integrated: the rounding errors of the accountant reach 1e-11.
_ACCOUNTANT_FROM = 1e-4

# A large delta can pay for an update on its own, and the conversion then says 0 or less. A
# bound stays a bound when it is raised: no epsilon after an update is reported as 0.
LEAST_EPSILON = 1e-6


@functools.lru_cache(maxsize=256)
def divergences(event):
    """RDP of one event, at every order of ``ORDERS``.

    Args:
      event: ``GaussianDpEvent``, ``PoissonSampledDpEvent`` of one, or ``NonPrivateDpEvent``.
        Noise multipliers lie in [1e-100, 1e10] and sampling probabilities in [1e-50, 1].

    Returns:
      Read-only float array ``[len(ORDERS)]``: an upper bound on the Renyi divergence of each
      order between the outputs on two neighbouring data sets (one example added or removed,
      or replaced by a null one). Events that follow each other add up.
    """
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        rdp = _sampled_gaussian(event)
    else:
        rdp = dp_accounting_rdp.RdpAccountant(ORDERS).compose(event).rdp
    rdp.flags.writeable = False
    return rdp


def epsilon_of(rdp, delta):
    """The smallest epsilon that RDP at the orders ``ORDERS`` implies.

    Canonne, Kamath, Steinke, "The discrete Gaussian for differential privacy" (2020,
    arXiv 2004.00010), Proposition 12:

        epsilon = min over a of  rdp(a) + log(1 - 1/a) - log(delta * a) / (a - 1)

    Args:
      rdp: float array ``[len(ORDERS)]``.
      delta: float in (0, 1).

    Returns:
      float, at least ``LEAST_EPSILON``; ``inf`` when the RDP is infinite at every order.
    """
    bounds = rdp + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
    return max(float(np.min(bounds)), LEAST_EPSILON)


def _sampled_gaussian(event):
    q, sigma = event.sampling_probability, event.event.noise_multiplier
    if sigma < _CLOSED_FORM_BELOW:
        return _small_noise_bound(q, sigma)
    if sigma >= _INTEGRATED_FROM:
        return np.array([sampled_gaussian_divergence(q, sigma, a) for a in ORDERS])
    rdp = np.full(len(ORDERS), np.inf)  # and so it stays at the large orders
    asked = (ORDERS >= 2) & (ORDERS < 64)
    with _without_convergence_warnings():
        rdp[asked] = dp_accounting_rdp.RdpAccountant(ORDERS[asked]).compose(event).rdp
    integrated = ~asked & (ORDERS < _LARGE_ORDERS[0]) | (rdp * (ORDERS - 1) < _ACCOUNTANT_FROM)
    rdp[integrated] = [sampled_gaussian_divergence(q, sigma, a) for a in ORDERS[integrated]]
    return rdp


def sampled_gaussian_divergence(sampling_probability, noise_multiplier, order):
    """Renyi divergence of the Poisson-sampled Gaussian mechanism, by integration.

    Mironov, Talwar, Zhang, "Renyi differential privacy of the sampled Gaussian mechanism"
    (2019, arXiv 1908.10530), section 3: with L(z) the likelihood ratio between the mixture
    (1 - q) N(0, s^2) + q N(1, s^2) and N(0, s^2),

        rdp(a) = log(A) / (a - 1),    A = E[L(z)^a],    z ~ N(0, s^2).

    A is close to 1 when the mechanism is very private. Since E[L] = 1,

        A - 1 = E[g(L)],    g(L) = L^a - 1 - a (L - 1) >= 0,

    and nothing cancels in the expectation. The trapezoidal rule converges geometrically on
    it: the integrand decays like a Gaussian and is analytic up to a distance of pi s^2 from
    the real axis (everywhere, if the order is an integer).

    Args:
      sampling_probability: float in [1e-50, 1).
      noise_multiplier: float in [0.01, 1e10]; time and memory grow with its inverse square.
      order: float above 1.

    Returns:
      float, with a relative error of about 1e-12.
    """
    q, sigma, a = sampling_probability, noise_multiplier, float(order)
    step = sigma / 4 if a.is_integer() else min(sigma / 4, sigma**2 / 2)
    z = np.arange(-10 * sigma, a + 10 * sigma, step)
    log_shift = (2 * z - 1) / (2 * sigma**2)  # log of the ratio of N(1, s^2) to N(0, s^2)
    log_ratio = np.where(
        log_shift < 30,
        np.log1p(q * np.expm1(np.minimum(log_shift, 30))),
        np.logaddexp(math.log1p(-q), math.log(q) + log_shift),
    )
    log_density = -((z / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))
    log_excess = special.logsumexp(_log_bregman(log_ratio, a) + log_density) + math.log(step)
    return float(np.logaddexp(0, log_excess)) / (a - 1)


def _log_bregman(log_ratio, a):
    """log(L^a - 1 - a (L - 1)) from log(L), exact to rounding for any L."""
    power = a * log_ratio
    near = np.abs(power) < 1e-3
    far = power > 30
    result = np.empty_like(log_ratio)
    with np.errstate(divide="ignore"):  # L = 1 contributes 0: its log is -inf
        t = log_ratio[near]
        tail = 1 + (a + 1) * t / 3 + (a * a + a + 1) * t**2 / 12 + (a + 1) * (a * a + 1) * t**3 / 60
        result[near] = np.log(a * (a - 1) / 2 * t**2 * tail)
        t = log_ratio[~near & ~far]
        result[~near & ~far] = np.log(np.expm1(a * t) - a * np.expm1(t))
    t = log_ratio[far]
    result[far] = a * t + np.log1p((a - 1) * np.exp(-a * t) - a * np.exp(-(a - 1) * t))
    return result


def _small_noise_bound(q, sigma):
    """An upper bound that is tight for little noise, at every order.

    By Minkowski's inequality the a-norm of the likelihood ratio (1 - q) + q R, where R is the
    ratio of N(1, s^2) to N(0, s^2), is at most (1 - q) + q exp((a - 1) / (2 s^2)).
    """
    with np.errstate(over="ignore"):
        log_norm = np.logaddexp(math.log1p(-q), math.log(q) + (ORDERS - 1) / (2 * sigma**2))
        return ORDERS / (ORDERS - 1) * log_norm


@contextlib.contextmanager
def _without_convergence_warnings():
    """Silences what dp-accounting logs about orders that did not converge.

    It leaves those orders out, which is sound; the user can do nothing about it.
    """

    def other_message(record):
        return "failed to converge" not in str(record.msg)

    logger = absl.logging.get_absl_logger()
    logger.addFilter(other_message)
    try:
        yield
    finally:
        logger.removeFilter(other_message)
