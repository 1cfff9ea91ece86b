"""A lower bound on epsilon from many training runs: with the canary, and without it.

An attack that tells the two kinds of runs apart too well refutes the claim. Its errors (the false
positive rate among runs without the canary, the false negative rate among those with it) are
counted, and bounded from above by Clopper and Pearson's intervals (1934), which are exact. If
training is (epsilon, delta)-private, every attack satisfies (Kairouz et al. 2015, arXiv 1311.0776)

    FPR + e^epsilon FNR >= 1 - delta    and    FNR + e^epsilon FPR >= 1 - delta.

Nasr et al. 2023 (arXiv 2302.07956) get much more out of few runs for mechanisms that are Gaussian:
one attack gives mu = PPF(1 - FPR) - PPF(FNR), PPF being the quantiles of the standard normal
distribution, and mu the whole curve of epsilon against delta (Dong et al. 2019, arXiv 1905.02383).
"""

import math

import numpy as np
from scipy import optimize, special, stats

from keras_dp.accounting.checks import checked_delta, checked_int, checked_number
from keras_dp.auditing.guesses import checked_confidence

# The part of the runs that the threshold is chosen by; the bound is from the others.
_CHOOSING = 0.25
LEAST_RUNS = 8


def epsilon_of_rates(false_positive_rate, false_negative_rate, delta):
    """The smallest epsilon for which an attack with these error rates is possible.

    Args:
      false_positive_rate, false_negative_rate: floats, or arrays of one shape, in [0, 1].
      delta: float in (0, 1).

    Returns:
      float, or array: max(0, log((1 - delta - FPR) / FNR), log((1 - delta - FNR) / FPR)).
    """
    delta = checked_delta(delta)
    fpr = _checked_rates("false_positive_rate", false_positive_rate)
    fnr = _checked_rates("false_negative_rate", false_negative_rate)
    with np.errstate(divide="ignore", invalid="ignore"):
        first = np.log(np.maximum(1 - delta - fpr, 0)) - np.log(fnr)
        second = np.log(np.maximum(1 - delta - fnr, 0)) - np.log(fpr)
    # Where delta alone allows the errors, nothing is refuted.
    first = np.where(1 - delta - fpr > 0, first, 0.0)
    second = np.where(1 - delta - fnr > 0, second, 0.0)
    return np.maximum(np.maximum(first, second), 0.0)[()]


def mu_of_rates(false_positive_rate, false_negative_rate):
    """The smallest mu for which an attack on a mu-GDP mechanism can have these error rates.

    Args:
      false_positive_rate, false_negative_rate: floats, or arrays of one shape, in [0, 1].

    Returns:
      float, or array: max(0, PPF(1 - FPR) - PPF(FNR)).
    """
    fpr = _checked_rates("false_positive_rate", false_positive_rate)
    fnr = _checked_rates("false_negative_rate", false_negative_rate)
    with np.errstate(invalid="ignore"):
        mu = np.where((fpr >= 1) | (fnr >= 1), 0.0, -special.ndtri(fpr) - special.ndtri(fnr))
    return np.maximum(mu, 0.0)[()]


def epsilon_of_mu(mu, delta):
    """Epsilon of a mu-GDP mechanism, such as one Gaussian release of noise multiplier 1 / mu.

    Solves delta = CDF(-epsilon / mu + mu / 2) - e^epsilon CDF(-epsilon / mu - mu / 2) (Balle and
    Wang 2018, arXiv 1805.06530, Theorem 8; Dong et al. 2019, arXiv 1905.02383, Corollary 2.13).

    Args:
      mu: float >= 0.
      delta: float in (0, 1).

    Returns:
      float >= 0; ``inf`` for infinite mu.
    """
    delta = checked_delta(delta)
    mu = checked_number("mu", mu, lambda value: value >= 0, "a number of at least 0", "")
    if mu == 0 or math.isinf(mu):
        return mu

    def excess(epsilon):
        return (
            special.ndtr(-epsilon / mu + mu / 2)
            - np.exp(epsilon + special.log_ndtr(-epsilon / mu - mu / 2))
            - delta
        )

    if excess(0.0) <= 0:
        return 0.0
    # CDF(-epsilon / mu + mu / 2) alone is below delta there.
    largest = mu * (mu / 2 - special.ndtri(delta)) + 1
    return float(optimize.brentq(excess, 0.0, max(largest, 1.0), xtol=1e-10))


class Errors:
    """The scores of runs with and without the canary, and what they refute.

    An attack says "with" where a score is at least a threshold. The threshold is chosen by the
    first quarter of the runs of both kinds; its errors are counted in the others, so that the
    choice does not make the bound too large.

    Args:
      scores_with, scores_without: float arrays ``[runs]`` of independent runs, larger where the
        canary seems to have been in. NaN counts as 0.

    Raises:
      ValueError: fewer than 8 scores of a kind.
    """

    def __init__(self, scores_with, scores_without):
        self._with = _checked_scores("scores_with", scores_with)
        self._without = _checked_scores("scores_without", scores_without)

    def epsilon(self, delta, confidence=0.95):
        """A lower bound on epsilon for any mechanism.

        With n runs of each kind it cannot exceed about log(n / 5), whatever the attack.

        Args:
          delta: float in (0, 1).
          confidence: float in (0, 1); both error rates hold together with this probability.

        Returns:
          float >= 0.
        """
        checked_delta(delta)
        return float(self._best(lambda fpr, fnr: epsilon_of_rates(fpr, fnr, delta), confidence))

    def mu(self, confidence=0.95):
        """A lower bound on mu, if the mechanism is mu-GDP.

        Gaussian noise on everything (batches of all examples) is; with sampling it is nearly so
        after many updates, and this is an estimate, no bound.

        Args:
          confidence: float in (0, 1).

        Returns:
          float >= 0.
        """
        return float(self._best(mu_of_rates, confidence))

    def _best(self, measure, confidence):
        level = (1 - checked_confidence(confidence)) / 2
        choose = [int(len(scores) * _CHOOSING) for scores in (self._with, self._without)]
        chosen = (self._with[: choose[0]], self._without[: choose[1]])
        rest = (self._with[choose[0] :], self._without[choose[1] :])

        def measured(thresholds, scores):
            counts = _errors(*scores, thresholds)
            bounds = [upper_bound(k, len(s), level) for k, s in zip(counts, reversed(scores))]
            return measure(*bounds)

        thresholds = np.unique(np.concatenate(chosen))
        best = thresholds[np.argmax(measured(thresholds, chosen))]
        return measured(np.array([best]), rest)[0]


def upper_bound(count, number, level):
    """Clopper and Pearson's one-sided upper bound on a probability.

    Args:
      count: float or array in [0, number], how often it happened.
      number: int >= 1, how often it could have.
      level: float in (0, 1), the probability that the bound is too small, at most.

    Returns:
      float or array in (0, 1].
    """
    count = np.asarray(count, np.float64)
    some = np.minimum(count, number - 0.5)
    bound = stats.beta.ppf(1 - level, some + 1, number - some)
    return np.where(count >= number, 1.0, bound)[()]


def _errors(scores_with, scores_without, thresholds):
    """How many false positives and false negatives there are at each threshold."""
    with_, without = np.sort(scores_with), np.sort(scores_without)
    negatives = np.searchsorted(with_, thresholds, side="left")
    positives = len(without) - np.searchsorted(without, thresholds, side="left")
    return positives, negatives


def _checked_scores(name, scores):
    scores = np.nan_to_num(np.asarray(scores, np.float64), nan=0.0)
    if scores.ndim != 1:
        raise ValueError(f"{name} must have the shape [runs]; received {scores.shape}.")
    checked_int(
        f"len({name})", len(scores), LEAST_RUNS, "Some hundred runs of each kind tell something."
    )
    return scores


def _checked_rates(name, rates):
    rates = np.asarray(rates, np.float64)
    if not np.all((rates >= 0) & (rates <= 1)):
        raise ValueError(f"{name} must be in [0, 1]; received {rates}. Pass errors over runs.")
    return rates
