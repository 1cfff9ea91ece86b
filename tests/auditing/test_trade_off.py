"""The bound from many trainings: closed forms, dp-accounting, and mechanisms of known privacy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from keras_dp import accounting, auditing
from keras_dp.auditing.trade_off import upper_bound


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


@given(st.floats(0.01, 8))
def test_randomized_response_reveals_its_epsilon(epsilon):
    wrong = 1 / (1 + math.exp(epsilon))
    assert auditing.epsilon_of_rates(wrong, wrong, 1e-12) == pytest.approx(epsilon, abs=1e-4)


@pytest.mark.parametrize(
    ("fpr", "fnr", "epsilon"),
    [
        (0.5, 0.5, 0.0),
        (1.0, 0.0, 0.0),  # whoever always says "with" reveals nothing
        (0.0, 1.0, 0.0),
        (0.01, 0.4, math.log(0.5 / 0.01)),
        (0.4, 0.01, math.log(0.5 / 0.01)),
        (0.0, 0.2, math.inf),
    ],
)
def test_epsilon_of_rates(fpr, fnr, epsilon):
    assert auditing.epsilon_of_rates(fpr, fnr, 0.1) == pytest.approx(epsilon)


@given(mu=st.floats(0.05, 6), threshold=st.floats(-2, 4))
def test_any_threshold_of_a_gaussian_gives_its_mu(mu, threshold):
    fpr, fnr = stats.norm.sf(threshold), stats.norm.cdf(threshold - mu)
    assert auditing.mu_of_rates(fpr, fnr) == pytest.approx(mu, abs=1e-6)


def test_mu_where_rates_are_extreme():
    np.testing.assert_array_equal(auditing.mu_of_rates([1, 0, 0, 0.5], [0, 1, 0.5, 0.9])[:2], 0)
    assert auditing.mu_of_rates(0.5, 0.9) == 0
    assert auditing.mu_of_rates(0.0, 0.5) == math.inf


@pytest.mark.parametrize(("sigma", "steps"), [(4.0, 1), (2.0, 9), (1.0, 1), (0.5, 4)])
@pytest.mark.parametrize("delta", [1e-5, 1e-2])
def test_epsilon_of_mu_is_that_of_dp_accounting(sigma, steps, delta):
    phase = accounting.Phase(
        num_examples=10, batch_size=10, noise_multiplier=sigma, steps=steps, sampling="full_batch"
    )
    expected = accounting.epsilon_of_phases([phase], delta, "pld")
    found = auditing.epsilon_of_mu(math.sqrt(steps) / sigma, delta)
    assert found <= expected + 1e-9
    assert found == pytest.approx(expected, rel=0.01)


def test_epsilon_of_mu_at_its_ends():
    assert auditing.epsilon_of_mu(0, 1e-5) == 0
    assert auditing.epsilon_of_mu(1e-6, 1e-5) == 0
    assert auditing.epsilon_of_mu(math.inf, 1e-5) == math.inf
    assert 1250 < auditing.epsilon_of_mu(50.0, 1e-5) < 1250 + 50 * 5


@given(number=st.integers(1, 500), part=st.floats(0, 1), level=st.floats(0.001, 0.5))
@settings(deadline=None)
def test_upper_bound_is_clopper_and_pearsons(number, part, level):
    count = round(part * number)
    exact = stats.binomtest(count, number, alternative="less").proportion_ci(1 - level, "exact")
    assert upper_bound(count, number, level) == pytest.approx(exact.high, abs=1e-9)


@pytest.mark.parametrize("mu", [0.3, 2.0])
def test_gaussian_scores_are_bounded_by_their_privacy(mu):
    """Bounds at 90 % are above the truth in at most one of ten experiments; mu comes close."""
    rng, delta = np.random.default_rng(0), 1e-5
    truth, above, mus = auditing.epsilon_of_mu(mu, delta), 0, []
    for _ in range(300):
        errors = auditing.Errors(rng.normal(mu, size=400), rng.normal(size=400))
        mus.append(errors.mu(0.9))
        above += errors.epsilon(delta, 0.9) > truth
    assert np.mean(np.array(mus) > mu) <= 0.1 + 3 * np.sqrt(0.09 / 300)
    assert np.median(mus) > mu - 0.4
    assert above <= 0.1 * 300 + 3 * np.sqrt(0.09 * 300)


def test_a_threshold_chosen_among_all_runs_would_not_hold():
    """Scores that say nothing: the mu at the best of all thresholds is above 0 too often."""
    rng, honest, greedy = np.random.default_rng(0), 0, 0
    for _ in range(300):
        with_, without = rng.normal(size=(2, 100))
        honest += auditing.Errors(with_, without).mu(0.8) > 0
        thresholds = np.concatenate([with_, without])[:, None]
        counts = np.sum(without >= thresholds, 1), np.sum(with_ < thresholds, 1)
        bounds = [upper_bound(count, 100, 0.1) for count in counts]
        greedy += np.max(auditing.mu_of_rates(*bounds)) > 0
    assert honest <= 0.2 * 300 + 3 * np.sqrt(0.16 * 300)
    assert greedy > honest


def test_epsilon_cannot_exceed_what_the_runs_can_show():
    errors = auditing.Errors(np.ones(1000), np.zeros(1000))
    assert math.log(1000 / 6) < errors.epsilon(1e-5) < math.log(1000)


def test_errors():
    with pytest.raises(ValueError, match=r"len\(scores_with\)"):
        auditing.Errors(np.zeros(3), np.zeros(10))
    with pytest.raises(ValueError, match="shape"):
        auditing.Errors(np.zeros((10, 1)), np.zeros(10))
    with pytest.raises(ValueError, match="false_positive_rate"):
        auditing.mu_of_rates(1.5, 0.1)
    with pytest.raises(ValueError, match="delta"):
        auditing.Errors(np.zeros(10), np.zeros(10)).epsilon(0)
    with pytest.raises(ValueError, match="mu must be"):
        auditing.epsilon_of_mu(math.nan, 1e-5)
