"""The bound from one training: against sums written out, and on mechanisms of known epsilon."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

from keras_dp import auditing


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def binomial(k, n, p):
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def p_value_by_hand(m, r, v, epsilon, delta):
    """Theorem 5.2 of Steinke et al. 2023, sum by sum."""
    p = 1 / (1 + math.exp(-epsilon))
    beta = sum(binomial(k, r, p) for k in range(v, r + 1))
    alpha = max(
        (sum(binomial(k, r, p) for k in range(max(v - i, 0), v)) / i for i in range(1, m + 1)),
        default=0,
    )
    return min(1, beta + 2 * m * delta * alpha)


@given(
    m=st.integers(1, 40),
    parts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    epsilon=st.floats(0, 6),
    delta=st.floats(0, 0.1),
)
@settings(max_examples=60, deadline=None)
def test_p_value_is_the_theorem(m, parts, epsilon, delta):
    r = max(round(parts[0] * m), 1)
    v = round(parts[1] * r)
    found = auditing.p_value_of_guesses(
        epsilon, num_canaries=m, num_guesses=r, num_correct=v, delta=delta
    )
    assert found == pytest.approx(p_value_by_hand(m, r, v, epsilon, delta), abs=1e-9)


def test_all_right_without_delta():
    """p^m = 1 - confidence, p = e^epsilon / (1 + e^epsilon)."""
    for m in (10, 1000):
        found = auditing.epsilon_of_guesses(
            num_canaries=m, num_guesses=m, num_correct=m, delta=0, confidence=0.95
        )
        assert found == pytest.approx(special.logit(0.05 ** (1 / m)), rel=1e-9)


@given(
    counts=st.lists(st.integers(0, 300), min_size=3, max_size=3).map(sorted),
    delta=st.floats(1e-9, 1e-3),
    confidence=st.floats(0.5, 0.999),
)
@settings(max_examples=40, deadline=None)
def test_laws(counts, delta, confidence):
    v, r, m = counts[0], max(counts[1], 1), max(counts[2], 1)
    case = {"num_canaries": m, "num_guesses": r, "num_correct": v}

    def bound(**changes):
        settings = case | {"delta": delta, "confidence": confidence} | changes
        return auditing.epsilon_of_guesses(**settings)

    found = bound()
    assert bound(delta=2 * delta) <= found + 1e-9
    assert bound(confidence=(1 + confidence) / 2) <= found + 1e-9
    assert bound(num_canaries=m + 100) <= found + 1e-9
    if found > 0:
        p = auditing.p_value_of_guesses(found, delta=delta, **case)
        assert p <= 1 - confidence
        assert auditing.p_value_of_guesses(found + 1e-6, delta=delta, **case) > 1 - confidence
        if v < r:
            assert bound(num_correct=v + 1) >= found - 1e-9


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_randomized_response_is_bounded_by_its_epsilon(epsilon):
    """Each coin is told with probability e^epsilon / (1 + e^epsilon): the worst that is allowed.

    A bound at 90 % may be above epsilon in one of ten experiments, and comes close.
    """
    rng, bounds = np.random.default_rng(0), []
    for _ in range(300):
        correct = int(rng.binomial(1000, special.expit(epsilon)))
        bounds.append(
            auditing.epsilon_of_guesses(
                num_canaries=1000, num_guesses=1000, num_correct=correct, delta=0, confidence=0.9
            )
        )
    above = np.mean(np.array(bounds) > epsilon)
    assert 0.05 < above <= 0.1 + 3 * np.sqrt(0.09 / 300)
    assert np.median(bounds) > epsilon - 0.35


def test_choosing_the_best_of_several_numbers_keeps_the_confidence():
    """Scores that say nothing are taken for a leak in at most one of ten experiments."""
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        included = rng.integers(0, 2, 300).astype(bool)
        scores = rng.normal(size=300)
        wrong += (
            auditing.epsilon_of_scores(
                scores, included, delta=0, confidence=0.9, num_guesses=(30, 60, 100, 150, 300)
            )
            > 0
        )
    assert wrong / 400 <= 0.1 + 3 * np.sqrt(0.09 / 400)


def test_guesses():
    scores = np.array([0.0, 5.0, np.nan, -3.0, 2.0, -1.0])
    np.testing.assert_array_equal(auditing.guesses_of_scores(scores, 2), [0, 1, 0, -1, 0, 0])
    np.testing.assert_array_equal(auditing.guesses_of_scores(scores, 3), [0, 1, 0, -1, 1, 0])
    np.testing.assert_array_equal(np.abs(auditing.guesses_of_scores(scores, 6)), 1)


def test_usual_numbers_leave_out_what_refutes_little():
    included = np.tile([True, False], 500)
    scores = np.where(included, 1.0, -1.0)
    usual = auditing.epsilon_of_scores(scores, included, delta=1e-6)
    named = auditing.epsilon_of_scores(
        scores, included, delta=1e-6, num_guesses=(50, 200, 1000), confidence=0.95
    )
    assert usual == named > 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_correct": 11}, "num_correct=11"),
        ({"num_guesses": 101}, "num_guesses=101"),
        ({"num_guesses": 0}, "num_guesses must be a whole number of at least 1"),
        ({"delta": 1.0}, "delta must be a number above 0 and below 1"),
        ({"delta": math.nan}, "delta must be"),
        ({"confidence": 95}, "confidence must be a number above 0 and below 1"),
    ],
)
def test_errors(changes, message):
    case = {"num_canaries": 100, "num_guesses": 10, "num_correct": 9, "delta": 1e-5} | changes
    with pytest.raises(ValueError, match=message):
        auditing.epsilon_of_guesses(**case)


def test_errors_of_scores():
    with pytest.raises(ValueError, match="bool array"):
        auditing.epsilon_of_scores(np.zeros(4), np.zeros(4), delta=0)
    with pytest.raises(ValueError, match="num_guesses=5"):
        auditing.guesses_of_scores(np.zeros(4), 5)
    with pytest.raises(ValueError, match="num_guesses is empty"):
        auditing.epsilon_of_scores(np.zeros(4), np.ones(4, bool), delta=0, num_guesses=())
    with pytest.raises(ValueError, match="epsilon must be"):
        auditing.p_value_of_guesses(-1, num_canaries=2, num_guesses=2, num_correct=2, delta=0)
