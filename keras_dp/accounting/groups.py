"""What a run promises a person who owns several of the protected units: group privacy."""

import math

import dp_accounting
import numpy as np
from dp_accounting import dp_event
from scipy import stats

from keras_dp import renyi
from keras_dp.accounting import pld
from keras_dp.accounting.checks import checked_choice, checked_delta, checked_int
from keras_dp.accounting.composition import ACCOUNTANTS, Releases, Spent

# Delta of a single unit that is looked for, as a power of ten below the delta of the group.
_EXPONENTS = np.linspace(0, 250, 2501)


def epsilon_of_group(phases, delta, group_size, accountant="rdp"):
    """The epsilon for all the units of one group together, such as the examples of one person.

    Neighbouring data sets differ by one group of up to ``group_size`` units, all of which are added
    or removed, zeroed, or replaced, as the relation of the phases says.

    * Gaussian noise without amplification (shuffled and full batches): the sum moves by up to
      group_size times the sensitivity. Exact.
    * Poisson sampling, units added, removed or zeroed: a binomial number of them is in a batch
      (Charles et al. 2024, arXiv 2407.07737; dp-accounting's mixture of Gaussians). Exact.
    * all else: from (epsilon, delta) of one unit follow, for k units, k epsilon and
      delta (exp(k epsilon) - 1) / (exp(epsilon) - 1) (Vadhan 2017, "The complexity of differential
      privacy", Lemma 2.2, summed). A loose bound, by RDP.

    Args:
      phases: as for :func:`epsilon_of_phases`.
      delta: float in (0, 1), of the group.
      group_size: int >= 1, units of one group at most.
      accountant: "rdp" or "pld".

    Returns:
      float: 0.0 if there was no update; ``inf`` if nothing can be said.

    Raises:
      ValueError: not such arguments.
    """
    delta = checked_delta(delta)
    group_size = checked_int("group_size", group_size, 1, "Count the units of one person.")
    checked_choice("accountant", accountant, ACCOUNTANTS)
    spent = Spent(phases)
    grouped = _grouped(spent, group_size)
    if grouped is None:
        return _converted(spent, delta, group_size)
    rdp = sum((float(r.count) * r.rdp for r in grouped), np.zeros(len(renyi.ORDERS)))
    if np.all(np.isinf(rdp)) and math.isfinite(spent.epsilon(delta)):
        return _converted(spent, delta, group_size)
    epsilon = renyi.epsilon_of(rdp, delta) if grouped else 0.0
    if accountant == "rdp":
        return epsilon
    return pld.epsilon_of(grouped, spent.relation, delta, epsilon)


def is_exact(phases, group_size):
    """Whether the releases of a group are known, or only the conversion is left."""
    return _grouped(Spent(phases), group_size) is not None


def _grouped(spent, group_size):
    """The releases as a whole group sees them; None if one is not known."""
    replace_one = spent.relation == "replace_one"
    grouped = []
    for r in spent.releases:
        event = _group_event(r.event, group_size, replace_one)
        if event is None:
            return None
        grouped.append(Releases(event, r.count, renyi.divergences(event, replace_one)))
    return grouped


def _group_event(event, group_size, replace_one):
    if group_size == 1 or isinstance(event, dp_accounting.NonPrivateDpEvent):
        return event
    if isinstance(event, dp_accounting.GaussianDpEvent):
        return dp_accounting.GaussianDpEvent(event.noise_multiplier / group_size)
    if isinstance(event, dp_accounting.PoissonSampledDpEvent) and not replace_one:
        counts = range(group_size + 1)
        drawn = stats.binom.pmf(counts, group_size, event.sampling_probability)
        if drawn.min() > 0:
            return dp_event.MixtureOfGaussiansDpEvent(
                event.event.noise_multiplier, tuple(counts), tuple(map(float, drawn))
            )
    return None


def _converted(spent, delta, k):
    """The smallest k epsilon(d) over the d for which d (e^(k eps) - 1) / (e^eps - 1) <= delta."""
    if not spent.releases:
        return 0.0
    smallest = math.inf
    for exponent in _EXPONENTS:
        single = delta * 10.0**-exponent
        if single == 0:
            break
        epsilon = spent.epsilon(single)
        if math.log(single) + _log_geometric_sum(epsilon, k) <= math.log(delta):
            smallest = min(smallest, k * epsilon)
            break  # a smaller delta has a larger epsilon
    return smallest


def _log_geometric_sum(epsilon, k):
    """log of (exp(k epsilon) - 1) / (exp(epsilon) - 1) = 1 + exp(epsilon) + ..."""
    return (k - 1) * epsilon + math.log(-math.expm1(-k * epsilon) / -math.expm1(-epsilon))
