"""Attacks: against counting by hand, and on scores whose laws are known."""

import json

import numpy as np
import pytest
from scipy import stats

from keras_dp import auditing


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def test_auc_is_the_chance_that_a_member_scores_higher():
    rng = np.random.default_rng(0)
    scores, members = rng.integers(0, 8, 60).astype(float), rng.integers(0, 2, 60).astype(bool)
    report = auditing.attack_report("test", scores, members)
    pairs = scores[members][:, None] - scores[~members][None]
    assert report.auc == pytest.approx(np.mean((pairs > 0) + 0.5 * (pairs == 0)))


def test_true_positive_rates():
    scores = np.array([9, 8, 7, 6, 5, 4, 3, 2], float)
    members = np.array([1, 1, 0, 1, 0, 0, 1, 0], bool)
    report = auditing.attack_report("test", scores, members)
    assert report.tpr_at(0) == 0.5 and report.tpr_at(0.24) == 0.5
    assert report.tpr_at(0.25) == 0.75 and report.tpr_at(0.75) == 1
    assert report.advantage == 0.5
    low, high = report.tpr_interval(0)
    exact = stats.binomtest(2, 4).proportion_ci(0.95, "exact")
    assert (low, high) == pytest.approx((exact.low, exact.high))
    assert json.loads(json.dumps(report.to_dict()))["tpr_at_fpr"]["0.1"] == 0.5
    assert "AUC 0.750" in str(report)


def test_equal_scores_are_one_point():
    report = auditing.attack_report("test", np.zeros(10), np.arange(10) < 5)
    assert report.auc == 0.5 and report.tpr_at(0.5) == 0


def test_nan_is_no_member():
    report = auditing.attack_report("test", [np.nan, 1.0, 0.0], np.array([False, True, True]))
    assert report.auc == 1


def test_confidence_is_the_logarithm_of_the_odds():
    logits = np.random.default_rng(0).normal(size=(50, 4))
    labels = np.arange(50) % 4
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    own = p[np.arange(50), labels]
    for outputs, from_logits in ((logits, True), (p, False)):
        found = auditing.label_confidences(outputs, labels, from_logits)
        np.testing.assert_allclose(found, np.log(own / (1 - own)), atol=1e-9)


def test_confidence_of_two_classes_and_of_extremes():
    p, labels = np.array([0.9, 0.2]), np.array([1, 0])
    expected = np.log([9, 4])
    for outputs in (p, p[:, None]):
        found = auditing.label_confidences(outputs, labels, False)
        np.testing.assert_allclose(found, expected)
    logits = np.log(p / (1 - p))[:, None]
    np.testing.assert_allclose(auditing.label_confidences(logits, labels, True), expected)
    sure = auditing.label_confidences(np.array([[1.0, 0.0], [0.0, 1.0]]), [0, 0], False)
    assert np.all(np.isfinite(sure)) and sure[0] > 80 and sure[1] < -80
    sure = auditing.label_confidences(np.array([[1e4, 0.0], [0.0, 1e4]]), [0, 0], True)
    np.testing.assert_allclose(sure, [1e4, -1e4])


def shadows(models, examples=200, shift=1.5):
    """Confidences of models that are `shift` more sure of what they have seen, example by
    example around a level of its own."""
    rng = np.random.default_rng(0)
    members = rng.permuted(np.tile(np.arange(models) % 2 == 0, (examples, 1)), axis=1).T
    levels = 5 * rng.normal(size=examples)
    return levels + shift * members + rng.normal(size=(models, examples)), members


@pytest.mark.parametrize("models", [17, 80])  # a common variance, and one for each example
@pytest.mark.parametrize("offline", [False, True])
def test_lira_reaches_the_best_attack_where_a_threshold_fails(models, offline):
    confidences, members = shadows(models)
    scores = auditing.cross_lira_scores(confidences, members, offline)
    lira = auditing.attack_report("lira", scores, members)
    loss = auditing.attack_report("loss", confidences, members)
    best = stats.norm.cdf(1.5 / np.sqrt(2))  # AUC of the likelihood ratio of N(0, 1), N(1.5, 1)
    assert best - 0.06 < lira.auc < best + 0.02
    assert loss.auc < 0.65


def test_lira_of_one_model_is_the_likelihood_ratio():
    confidences, members = shadows(101, examples=3)
    mine, others, inside = confidences[0], confidences[1:], members[1:]
    expected = []
    for k in range(3):
        with_, without = others[inside[:, k], k], others[~inside[:, k], k]
        expected.append(
            stats.norm.logpdf(mine[k], with_.mean(), with_.std(ddof=1))
            - stats.norm.logpdf(mine[k], without.mean(), without.std(ddof=1))
        )
    np.testing.assert_allclose(auditing.lira_scores(mine, others, inside), expected)


@pytest.mark.parametrize("offline", [False, True])
def test_models_that_leak_nothing(offline):
    confidences, members = shadows(20, shift=0.0)
    scores = auditing.cross_lira_scores(confidences, members, offline)
    assert abs(auditing.attack_report("lira", scores, members).auc - 0.5) < 0.03


def test_errors():
    with pytest.raises(ValueError, match="bool array"):
        auditing.attack_report("test", [1.0, 2.0], np.array([0, 1]))
    with pytest.raises(ValueError, match="members and on others; received 2 and 0"):
        auditing.attack_report("test", [1.0, 2.0], np.array([True, True]))
    with pytest.raises(ValueError, match="false_positive_rate"):
        auditing.attack_report("test", [1.0, 2.0], np.array([True, False])).tpr_at(2)
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\)"):
        auditing.label_confidences(np.zeros((2, 2)), np.array([0, 2]), True)
    with pytest.raises(ValueError, match="whole-number labels"):
        auditing.label_confidences(np.zeros((2, 2)), np.array([0.0, 1.0]), True)
    confidences, members = shadows(3, examples=4)
    with pytest.raises(ValueError, match="only . shadow models"):
        auditing.lira_scores(confidences[0], confidences[1:], members[1:])
    with pytest.raises(ValueError, match=r"received \(4,\), \(3, 4\) and \(2, 4\)"):
        auditing.lira_scores(confidences[0], confidences, members[1:])
