"""Renyi differential privacy (RDP) of one noisy release, and from RDP to epsilon.

The events are those of dp-accounting, and so is the accountant that reads them. For the
Poisson-sampled Gaussian its numbers are exact at integer orders, but, measured with versions
0.5.0 and 0.6.0:

* At fractional orders it adds the absolute values of an alternating series: up to 0.1 % too large
  above order 2, up to thousands of times below, and for many settings it does not converge.
* Where the divergence is small (much noise, a small sampling probability) it cancels: the
  result is rounding error, sometimes negative, from which epsilon 0 is derived.
* Below a noise multiplier of about 1e-153 it returns NaN, from which epsilon 0 is derived.
* It knows nothing of replaced examples, truncated draws and groups under Poisson sampling.

There the divergence is integrated here instead, without cancellation.
"""

import functools
import math

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting import rdp as dp_accounting_rdp
from scipy import special, stats

_SMALL_ORDERS = [1.005, 1.01, 1.02, 1.035, 1.05, 1.075]  # the best ones for epsilon above 500
_LARGE_ORDERS = [2048, 4096, 8192, 16384]  # the best ones when epsilon is below 0.02
ORDERS = np.concatenate([_SMALL_ORDERS, dp_accounting_rdp.RdpAccountant().orders, _LARGE_ORDERS])
ORDERS.flags.writeable = False

# With less noise than this sampling hides next to nothing; a closed form is then as good
# as the integral, whose grid would grow with 1 / noise_multiplier**2.
_CLOSED_FORM_BELOW = 0.05
_CLOSED_FORM_BELOW_AT_ANY_ORDER, _CLOSED_FORM_FROM_ORDER = 0.01, 1.1
# With more noise than this, its rounding errors would show at many orders.
_INTEGRATED_FROM = 10.0
# More points than this would take longer than the result is worth.
_MOST_POINTS, _MOST_MIXTURE_POINTS = 4e5, 4e6
_MOST_NOISE_WITHOUT_REPLACEMENT = 1e3
# log(A) under this is integrated: the rounding errors of the accountant reach 1e-11.
_ACCOUNTANT_FROM = 1e-4

# A large delta can pay for an update on its own, and the conversion then says 0 or less. A
# bound stays a bound when it is raised: no epsilon after an update is reported as 0.
LEAST_EPSILON = 1e-6


@functools.lru_cache(maxsize=256)
def divergences(event, replace_one=False):
    """RDP of one event, at every order of ``ORDERS``.

    Args:
      event: ``GaussianDpEvent``, ``PoissonSampledDpEvent`` or ``SampledWithoutReplacementDpEvent``
        of one, ``TruncatedSubsampledGaussianDpEvent``, ``MixtureOfGaussiansDpEvent`` with the
        sensitivities 0, 1, 2 ..., or ``NonPrivateDpEvent``. Noise multipliers are relative to the
        clipping norm and lie in [1e-100, 1e10], sampling probabilities in [1e-50, 1].
      replace_one: bool, whether neighbouring data sets differ by an example that any other one
        replaces. Else by one that is added, removed or replaced by a null one.

    Returns:
      Read-only float array ``[len(ORDERS)]``: an upper bound on the Renyi divergence of each
      order between the outputs on two neighbouring data sets. Events that follow each other add up.

    Raises:
      ValueError: sampling without replacement, and not ``replace_one``.
    """
    if isinstance(event, dp_accounting.PoissonSampledDpEvent):
        q, sigma = event.sampling_probability, event.event.noise_multiplier
        rdp = _sampled_gaussian(q, sigma, replace_one)
    elif type(event).__name__ == "TruncatedSubsampledGaussianDpEvent":  # not in version 0.5
        rdp = _truncated_gaussian(event, replace_one)
    elif isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        rdp = _sampled_without_replacement(event, replace_one)
    elif isinstance(event, dp_accounting.GaussianDpEvent):
        rdp = _gaussian(event.noise_multiplier, replace_one)
    elif isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        rdp = _gaussian_mixture(event)
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
    return max(float(np.min(_bounds(rdp, delta))), LEAST_EPSILON)


def best_order(rdp, delta):
    """The order that :func:`epsilon_of` takes, and whether one outside the range might do better.

    Args:
      rdp: float array ``[len(ORDERS)]``, not infinite at every order.
      delta: float in (0, 1).

    Returns:
      float, the order; bool, whether it is the smallest or largest at which the RDP is known.
    """
    best, known = np.argmin(_bounds(rdp, delta)), np.flatnonzero(np.isfinite(rdp))
    return float(ORDERS[best]), bool(best in (known[0], known[-1]))


def _bounds(rdp, delta):
    return rdp + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)


def _gaussian(sigma, replace_one):
    """Two clipped gradients differ by up to twice the clipping norm."""
    sensitivity = 2 if replace_one else 1
    return ORDERS / 2 * (sensitivity / sigma) ** 2


def _sampled_gaussian(q, sigma, replace_one):
    if q == 1:
        return _gaussian(sigma, replace_one)
    if replace_one:
        return _replaced_sampled_gaussian(q, sigma)
    return _added_sampled_gaussian(q, sigma)


def _added_sampled_gaussian(q, sigma):
    if sigma < _CLOSED_FORM_BELOW:
        rdp = _small_noise_bound(q, sigma)
        if sigma >= _CLOSED_FORM_BELOW_AT_ANY_ORDER:
            small = ORDERS < _CLOSED_FORM_FROM_ORDER
            rdp[small] = [sampled_gaussian_divergence(q, sigma, a) for a in ORDERS[small]]
        return rdp
    if sigma >= _INTEGRATED_FROM:
        return np.array([sampled_gaussian_divergence(q, sigma, a) for a in ORDERS])
    rdp = np.full(len(ORDERS), np.inf)  # and so it stays at the large orders
    asked = (ORDERS >= 2) & (ORDERS < 64) & (ORDERS == np.floor(ORDERS))
    event = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    rdp[asked] = dp_accounting_rdp.RdpAccountant(ORDERS[asked]).compose(event).rdp
    integrated = ~asked & (ORDERS < _LARGE_ORDERS[0]) | (rdp * (ORDERS - 1) < _ACCOUNTANT_FROM)
    rdp[integrated] = [sampled_gaussian_divergence(q, sigma, a) for a in ORDERS[integrated]]
    return rdp


def _replaced_sampled_gaussian(q, sigma):
    """Poisson sampling, one example replaced: by integration, or a bound where that is too long."""
    rdp = _replaced_bound(q, sigma)
    orders = np.floor(_MOST_POINTS * _step(sigma, 1.5) / 2) if sigma < _INTEGRATED_FROM else np.inf
    if sigma >= _CLOSED_FORM_BELOW:
        integrated = ORDERS <= orders
        rdp[integrated] = [replaced_gaussian_divergence(q, sigma, a) for a in ORDERS[integrated]]
    return rdp


def _replaced_bound(q, sigma):
    """The smaller of two upper bounds on :func:`replaced_gaussian_divergence`, at every order.

    With A and B the two mixtures, N(m) for N(m, s^2) and D(a) the divergence of order a:
    exp((a - 1) D(a)) is jointly convex, so that of A and B is at most (1 - q) + q times that of
    N(1) and N(-1). And B >= (1 - q) N(0), so D(a) of A and B is at most that of A and N(0), less
    log(1 - q).
    """
    log_replaced = ORDERS * (ORDERS - 1) * 2 / sigma**2
    convex = np.logaddexp(math.log1p(-q), math.log(q) + log_replaced) / (ORDERS - 1)
    return np.minimum(convex, _small_noise_bound(q, sigma) - math.log1p(-q))


def _truncated_gaussian(event, replace_one):
    """Poisson draws from n units, cut at random to a capacity of b.

    Ganesh, Charles and others 2025 (arXiv 2508.15089) and dp-accounting: whether the other units
    fill the capacity does not depend on the one that differs. If they do not, it is plain Poisson
    sampling. If they do, that unit, where it is in the batch, stands in the place of another one:
    the sum moves by up to twice the clipping norm, with the probability that it is in the batch.
    exp((a - 1) times the divergence) of the mixture is at most the mixture of both (joint
    convexity).
    """
    n, q, b = event.dataset_size, event.sampling_probability, event.truncated_batch_size
    plain = _sampled_gaussian(q, event.noise_multiplier, replace_one)
    full = stats.binom.sf(b - 1, n - 1, q)
    if full == 0:
        return plain
    chosen = min(stats.binom.sf(b, n, q) * b / full / n, 1.0)
    if chosen < 1e-50:
        chosen = 1e-50
    cut = _sampled_gaussian(chosen, event.noise_multiplier / 2, replace_one)
    with np.errstate(divide="ignore"):
        log_plain, log_cut = np.log1p(-full), np.log(full)
    a = ORDERS - 1
    return np.logaddexp(log_plain + a * plain, log_cut + a * cut) / a


def _sampled_without_replacement(event, replace_one):
    """Wang, Balle, Kasiviswanathan 2019 (arXiv 1808.00087), Theorem 27, as in dp-accounting.

    It reads the noise relative to the sensitivity, which is twice the clipping norm here. Where
    that bound is larger than the divergence without sampling, the latter holds: the divergence of
    a mixture is at most the largest of its parts.
    """
    if not replace_one:
        raise ValueError(
            "Sampling without replacement is accounted for neighbouring data sets of one size "
            'only. Pass neighboring_relation="replace_one".'
        )
    sigma = event.event.noise_multiplier
    unsampled = _gaussian(sigma, replace_one)
    if sigma < _CLOSED_FORM_BELOW:
        return unsampled
    # More noise costs no more. From here on differences of numbers close to 1 lose their digits.
    half = dp_accounting.GaussianDpEvent(min(sigma, _MOST_NOISE_WITHOUT_REPLACEMENT) / 2)
    halved = dp_accounting.SampledWithoutReplacementDpEvent(
        event.source_dataset_size, event.sample_size, half
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    sampled = dp_accounting_rdp.RdpAccountant(ORDERS, relation).compose(halved).rdp
    return np.minimum(sampled, unsampled)


def _gaussian_mixture(event):
    """A group of k examples, of which a random number J is in the batch: the larger direction.

    The outputs with and without the group are M, the mixture of N(j, s^2) with the probabilities
    of J = j, and N(0, s^2) (Charles et al. 2024, arXiv 2407.07737, on user-level sampling). Orders
    at which the integral would take too long are left out.
    """
    sigma, probabilities = event.standard_deviation, np.array(event.sampling_probs)
    largest = len(probabilities) - 1
    # A polynomial of degree k with positive coefficients has no root within an angle of pi / k
    # from the positive axis, so M has no zero within pi s^2 / k from the real axis.
    fine = min(sigma / 4, sigma**2 / (2 * largest))

    def points(a):
        step = sigma / 4 if a.is_integer() else fine
        return np.arange(-10 * sigma, largest * a + 10 * sigma, step)

    def takes_too_long(a):
        step = sigma / 4 if a.is_integer() else fine
        return (largest * a + 20 * sigma) / step * len(probabilities) > _MOST_MIXTURE_POINTS

    rdp = np.full(len(ORDERS), np.inf)
    if takes_too_long(ORDERS[0]):
        return rdp
    z_removed = points(ORDERS[0])
    log_ratio = _log_gaussian_mixture(probabilities, sigma, z_removed)
    log_density = _log_normal(sigma, z_removed) + log_ratio
    for i, a in enumerate(ORDERS):
        if not takes_too_long(a):
            z = points(a)
            log_added = _log_gaussian_mixture(probabilities, sigma, z)
            added = _integrated(log_added, _log_normal(sigma, z), z, a)
            rdp[i] = max(added, _integrated(-log_ratio, log_density, z_removed, a))
    return rdp


def _log_gaussian_mixture(probabilities, sigma, z):
    """log of the ratio of the mixture of N(j, s^2) to N(0, s^2), without cancellation near 0."""
    j = np.arange(1, len(probabilities))[:, None]
    log_shift = j * (2 * z - j) / (2 * sigma**2)
    near = np.all(log_shift < 30, axis=0)
    weighted = np.log(probabilities[1:, None]) + log_shift
    result = special.logsumexp(weighted, axis=0)
    result = np.logaddexp(np.log(probabilities[0]), result)
    result[near] = np.log1p(probabilities[1:] @ np.expm1(log_shift[:, near]))
    return result


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
    z = np.arange(-10 * sigma, a + 10 * sigma, _step(sigma, a))
    return _integrated(_log_mixture(q, sigma, z), _log_normal(sigma, z), z, a)


def replaced_gaussian_divergence(sampling_probability, noise_multiplier, order):
    """Renyi divergence of the Poisson-sampled Gaussian when one example is replaced.

    The two examples with the largest effect have opposite gradients of the clipping norm: the
    outputs are A = (1 - q) N(0, s^2) + q N(1, s^2) and B = (1 - q) N(0, s^2) + q N(-1, s^2)
    (dp-accounting's privacy losses for the same relation; Schuchardt et al. 2024, arXiv
    2403.04867, section 3). With L = A / B the divergence is an expectation over B as in
    :func:`sampled_gaussian_divergence`, which tells how it is computed. B has zeros at a distance
    of pi s^2 from the real axis, so the step is the short one at every order.

    Args:
      sampling_probability, noise_multiplier, order: as there.

    Returns:
      float, with a relative error of about 1e-11.
    """
    q, sigma, a = sampling_probability, noise_multiplier, float(order)
    z = np.arange(-1 - 10 * sigma, 2 * a + 10 * sigma, _step(sigma, 1.5))
    log_b = _log_mixture(q, sigma, -z)
    return _integrated(_log_mixture(q, sigma, z) - log_b, _log_normal(sigma, z) + log_b, z, a)


def _step(sigma, a):
    """Step of the trapezoidal rule."""
    return sigma / 4 if float(a).is_integer() else min(sigma / 4, sigma**2 / 2)


def _log_normal(sigma, z):
    """log of the density of N(0, s^2)."""
    return -((z / sigma) ** 2) / 2 - math.log(sigma * math.sqrt(2 * math.pi))


def _log_mixture(q, sigma, z):
    """log of the ratio of (1 - q) N(0, s^2) + q N(1, s^2) to N(0, s^2)."""
    log_shift = (2 * z - 1) / (2 * sigma**2)  # log of the ratio of N(1, s^2) to N(0, s^2)
    return np.where(
        log_shift < 30,
        np.log1p(q * np.expm1(np.minimum(log_shift, 30))),
        np.logaddexp(math.log1p(-q), math.log(q) + log_shift),
    )


def _integrated(log_ratio, log_density, z, a):
    """log(E[L^a]) / (a - 1) from log(L) on a grid, and the log of the density."""
    log_excess = special.logsumexp(_log_bregman(log_ratio, a) + log_density)
    log_excess += math.log(z[1] - z[0])
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
