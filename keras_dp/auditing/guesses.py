"""A lower bound on epsilon from one training run, by guessing which canaries were in it.

Steinke, Nasr and Jagielski 2023, "Privacy Auditing with One (1) Training Run" (arXiv 2305.08846).
Each of m canaries is put into the training set by a fair coin of its own. An auditor sees what
training released and guesses r of the coins. Were the training (epsilon, delta)-private, the right
guesses would hardly exceed those of r coins that show their true side with probability
e^epsilon / (1 + e^epsilon). So many right guesses refute epsilon. One run is enough, because the
bound does not need the guesses to be independent.
"""

import numbers

import numpy as np
from scipy import special, stats

from keras_dp.accounting.checks import checked_delta, checked_int, checked_number

# Where e^epsilon / (1 + e^epsilon) is 1 in float64: no number of guesses refutes more.
_LARGEST_EPSILON = 36.0
_BISECTIONS = 48


def p_value_of_guesses(epsilon, *, num_canaries, num_guesses, num_correct, delta):
    """How likely so many right guesses are at most, if training is (epsilon, delta)-private.

    With W ~ Binomial(r, e^epsilon / (1 + e^epsilon)), r = ``num_guesses``, v = ``num_correct`` and
    m = ``num_canaries``:

        P[W >= v] + 2 m delta max_{1 <= i <= v} P[v > W >= v - i] / i

    (Steinke et al. 2023, arXiv 2305.08846, Theorem 5.2 with guesses of equal weight).

    Args:
      epsilon: float >= 0, the claim, under adding, removing or zeroing out one example.
      num_canaries: int >= 1, canaries that were each included with probability 1/2.
      num_guesses: int in [1, num_canaries], canaries that were guessed; the others were passed
        over. It must not have been chosen by looking at the coins.
      num_correct: int in [0, num_guesses].
      delta: float in [0, 1).

    Returns:
      float in [0, 1].

    Raises:
      ValueError: not such numbers.
    """
    counts = _checked_counts(num_canaries, num_guesses, num_correct)
    epsilon = checked_number(
        "epsilon", epsilon, lambda e: e >= 0, "a number of at least 0", "Pass what is claimed."
    )
    return _p_value(epsilon, *counts, _checked_delta_or_zero(delta))


def epsilon_of_guesses(*, num_canaries, num_guesses, num_correct, delta, confidence=0.95):
    """The largest epsilon that so many right guesses refute.

    Args:
      confidence: float in (0, 1). The bound is above the true epsilon with a probability of at
        most 1 - confidence.
      Others as of :func:`p_value_of_guesses`.

    Returns:
      float >= 0: with that confidence training is not (e, delta)-private for any e below it. 0 if
      nothing is refuted.

    Raises:
      ValueError: not such numbers.
    """
    counts = _checked_counts(num_canaries, num_guesses, num_correct)
    level = 1 - checked_confidence(confidence)
    delta = _checked_delta_or_zero(delta)
    refuted, open_ = 0.0, _LARGEST_EPSILON
    if _p_value(refuted, *counts, delta) > level:
        return 0.0
    # Whoever is private at a small epsilon is so at any larger one: a refuted point refutes all
    # below it, and the bisection only ever returns refuted points.
    for _ in range(_BISECTIONS):
        middle = (refuted + open_) / 2
        if _p_value(middle, *counts, delta) <= level:
            refuted = middle
        else:
            open_ = middle
    return refuted


def guesses_of_scores(scores, num_guesses):
    """Guesses the coins of the canaries whose scores stand out.

    Args:
      scores: float array ``[canaries]``, larger for canaries that seem to be in. NaN counts
        as 0.
      num_guesses: int in [1, canaries].

    Returns:
      int array ``[canaries]``: 1 (in) for the upper half of the guesses, which have the largest
      scores, -1 (out) for the lower half, which have the smallest, and 0 for all others.
    """
    scores = np.nan_to_num(np.asarray(scores, np.float64), nan=0.0)
    num_guesses = checked_int(
        "num_guesses", num_guesses, 1, "It is the number of canaries that are guessed."
    )
    if scores.ndim != 1 or num_guesses > len(scores):
        raise ValueError(
            f"num_guesses={num_guesses} needs scores of shape [canaries] with at least so many; "
            f"received shape {scores.shape}. Pass a score for each canary and fewer guesses."
        )
    order = np.argsort(scores, kind="stable")
    guesses = np.zeros(len(scores), np.int64)
    guesses[order[: num_guesses // 2]] = -1
    guesses[order[len(scores) - (num_guesses - num_guesses // 2) :]] = 1
    return guesses


def usual_numbers_of_guesses(num_canaries):
    """Numbers of guesses to try together: parts of the canaries, and all of them.

    With much noise many guesses together tell the most, with little noise the most certain ones.
    Fewer than 20 guesses refute little and are left out.
    """
    parts = {num_canaries // part for part in (100, 20, 5)}
    return (*sorted(number for number in parts if number >= 20), num_canaries)


def epsilon_of_scores(scores, included, *, delta, confidence=0.95, num_guesses=None):
    """The bound from the scores of canaries.

    Args:
      scores: float array ``[canaries]``; see :func:`guesses_of_scores`.
      included: bool array ``[canaries]``, the fair coins.
      delta: float in [0, 1).
      confidence: float in (0, 1).
      num_guesses: int, or several ints that are all tried; by default
        :func:`usual_numbers_of_guesses`. Of k tries each has to hold with confidence
        1 - (1 - confidence) / k, so the best of them may be taken. Fix it before looking.

    Returns:
      float >= 0, as :func:`epsilon_of_guesses`.

    Raises:
      ValueError: not such arguments.
    """
    included = np.asarray(included)
    if included.dtype != np.bool_ or included.shape != np.shape(scores):
        raise ValueError(
            "included must be a bool array with one entry for each score; received "
            f"{included.dtype} of shape {included.shape} for scores of shape {np.shape(scores)}."
        )
    if num_guesses is None:
        num_guesses = usual_numbers_of_guesses(len(included))
    tries = [num_guesses] if isinstance(num_guesses, numbers.Integral) else list(num_guesses)
    if not tries:
        raise ValueError("num_guesses is empty. Pass one int, or several, or leave it out.")
    level = (1 - checked_confidence(confidence)) / len(tries)
    found = []
    for number in tries:
        guesses = guesses_of_scores(scores, number)
        correct = int(np.sum(guesses == np.where(included, 1, -1)))
        found.append(
            epsilon_of_guesses(
                num_canaries=len(included),
                num_guesses=number,
                num_correct=correct,
                delta=delta,
                confidence=1 - level,
            )
        )
    return max(found)


def checked_confidence(confidence):
    """A probability that is neither 0 nor 1."""
    return checked_number(
        "confidence",
        confidence,
        lambda value: 0 < value < 1,
        "a number above 0 and below 1",
        "Pass the probability with which the bound has to hold, for example 0.95.",
    )


def _p_value(epsilon, num_canaries, num_guesses, num_correct, delta):
    truthful = special.expit(epsilon)
    exceeded = float(stats.binom.sf(num_correct - 1, num_guesses, truthful))
    if delta == 0 or num_correct == 0:
        return min(exceeded, 1.0)
    below = stats.binom.pmf(np.arange(num_correct - 1, -1, -1), num_guesses, truthful)
    steepest = np.max(np.cumsum(below) / np.arange(1, num_correct + 1))
    return min(exceeded + 2 * num_canaries * delta * float(steepest), 1.0)


def _checked_delta_or_zero(delta):
    is_zero = isinstance(delta, numbers.Real) and not isinstance(delta, bool) and delta == 0
    return 0.0 if is_zero else checked_delta(delta)


def _checked_counts(num_canaries, num_guesses, num_correct):
    num_canaries = checked_int("num_canaries", num_canaries, 1, "Count what was in or out.")
    num_guesses = checked_int("num_guesses", num_guesses, 1, "Count the guesses that were made.")
    num_correct = checked_int("num_correct", num_correct, 0, "Count the guesses that were right.")
    if not num_correct <= num_guesses <= num_canaries:
        raise ValueError(
            f"num_correct={num_correct}, num_guesses={num_guesses} and num_canaries="
            f"{num_canaries} must rise in this order: right guesses are some of the guesses, "
            "and those some of the canaries."
        )
    return num_canaries, num_guesses, num_correct
