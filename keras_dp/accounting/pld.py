"""Epsilon by privacy loss distributions (PLD), those of dp-accounting.

They are pessimistic (Doroshenko et al. 2022, "Connect the dots", arXiv 2207.04380): tighter than
RDP nearly everywhere, and slower. Where one cannot be computed soundly in reasonable time and
memory (epsilon above 1000, more than 2e6 sampled releases, a delta near the rounding errors of the
convolutions, a grid or a mechanism that dp-accounting refuses), or is not tighter, the value of
RDP stands, also a valid bound.
"""

import math

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting import pld as dp_accounting_pld

from keras_dp import renyi

# Probabilities from convolutions by FFT are off by about 2e-17 per composed release.
_FFT_ERROR_PER_RELEASE = 1e-16
# More convolved releases than this need a grid so coarse that RDP is as good.
_MOST_RELEASES = 2 * 10**6
_MOST_POINTS, _QUICK_POINTS = 1e6, 3e5

_RELATIONS = {
    "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "zero_out": dp_accounting.NeighboringRelation.REPLACE_SPECIAL,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def epsilon_of(releases, relation, delta, rdp_epsilon):
    """The smaller of the epsilons by PLD and by RDP.

    Args:
      releases: list of objects with ``event``, ``count`` and ``rdp``, as
        :class:`keras_dp.accounting.composition.Releases`.
      relation: a neighbouring relation.
      delta: float in (0, 1).
      rdp_epsilon: float, epsilon of the releases by RDP.

    Returns:
      float, at most ``rdp_epsilon``.
    """
    if not _is_sound(releases, delta, rdp_epsilon):
        return rdp_epsilon
    fft_error = _FFT_ERROR_PER_RELEASE * _convolved(releases)
    spacing, _ = _grid(releases, relation, rdp_epsilon)
    accountant = dp_accounting_pld.PLDAccountant(_RELATIONS[relation], spacing)
    try:
        for event, count in _parts(releases):
            accountant.compose(event, count)
    except ValueError as error:
        # dp-accounting refuses grids on which rounding errors show; 0.5.0 often, 0.6.0 rarely.
        if "non-increasing" not in str(error):
            raise
        return rdp_epsilon
    with np.errstate(over="ignore"):  # of an intermediate ratio, in comparisons where inf will do
        epsilon = float(accountant.get_epsilon(delta - fft_error))
    return min(max(epsilon, renyi.LEAST_EPSILON), rdp_epsilon)


def is_quick(releases, relation, delta, rdp_epsilon):
    """Whether :func:`epsilon_of` takes less than about a second."""
    if not _is_sound(releases, delta, rdp_epsilon):
        return True
    _, points = _grid(releases, relation, rdp_epsilon)
    return points <= _QUICK_POINTS


def _is_sound(releases, delta, rdp_epsilon):
    """Whether rounding errors and truncated tails stay well below delta, and the grid fits."""
    count = _convolved(releases)
    return (
        renyi.LEAST_EPSILON < rdp_epsilon < 1000
        and count <= _MOST_RELEASES
        and delta >= 10 * _FFT_ERROR_PER_RELEASE * count
        and delta >= 1e-12  # dp-accounting truncates tails of about 1e-15
        and not any(_is_without_replacement(r.event) for r in releases)
    )


def _convolved(releases):
    """How many releases are composed by convolution: all but plain Gaussians, which are one."""
    return sum(count for _, count in _parts(releases))


def _is_without_replacement(event):
    """dp-accounting knows its Renyi divergence, but no privacy loss distribution of it."""
    return isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent)


def _parts(releases):
    """Events and counts to compose: all plain Gaussians as one, whose precision is their sum."""
    precision = _gaussian_precision(releases)
    if precision > 0:
        yield dp_accounting.GaussianDpEvent(1 / math.sqrt(precision)), 1
    for r in releases:
        if not isinstance(r.event, dp_accounting.GaussianDpEvent):
            yield r.event, r.count


def _gaussian_precision(releases):
    gaussians = [r for r in releases if isinstance(r.event, dp_accounting.GaussianDpEvent)]
    return math.fsum(r.count / r.event.noise_multiplier**2 for r in gaussians)


def _noise_multiplier(event):
    """Of a sampled Gaussian, relative to the largest sensitivity (truncation aside)."""
    if isinstance(event, dp_event.MixtureOfGaussiansDpEvent):
        return event.standard_deviation / max(event.sensitivities)
    inner = getattr(event, "event", event)
    return inner.noise_multiplier


def _grid(releases, relation, rdp_epsilon):
    """The grid of privacy losses: its spacing, and a measure of the points to compute.

    Fine enough for a bound within about 1 % of the exact one, unless time or memory forbid it.
    Plain Gaussians are one part, see :func:`_parts`; all else goes on the grid one release at a
    time and is composed there. A loss below the spacing is overstated then, and the points are
    about releases * typical loss / spacing.
    """
    sensitivity = 2 if relation == "replace_one" else 1
    spacing, composed_loss, largest_loss = rdp_epsilon / 1e4, 0.0, 2 * rdp_epsilon
    for event, _ in _parts(releases):
        sigma = _noise_multiplier(event) / sensitivity
        largest_loss = max(largest_loss, 1 / sigma**2 + 20 / sigma)
    for r in releases:
        if not isinstance(r.event, dp_accounting.GaussianDpEvent):
            typical_loss = math.sqrt(2 * r.rdp[0] / renyi.ORDERS[0])
            spacing = min(spacing, typical_loss / 10)
            composed_loss += r.count * typical_loss / 4
    spacing = max(spacing, largest_loss / _MOST_POINTS, composed_loss / _MOST_POINTS)
    return spacing, (largest_loss + composed_loss) / spacing
