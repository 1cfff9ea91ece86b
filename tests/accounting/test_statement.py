"""The guarantee in words and numbers."""

import json
import re

import pytest

from keras_dp.accounting import (
    Phase,
    compute_epsilon,
    epsilon_of_phases,
    privacy_report,
    privacy_statement,
    report_of_phases,
    statement_of_phases,
)
from keras_dp.accounting.composition import Spent
from keras_dp.accounting.statement import _shown
from tests.accounting.runs import RUN, Training, needs_truncation, quietly


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def test_statement_says_what_it_has_to():
    text = privacy_statement(epochs=60, **RUN)
    by_rdp, by_pld = (compute_epsilon(epochs=60, accountant=a, **RUN) for a in ("rdp", "pld"))
    shown = [float(number) for number in re.findall(r"(?:epsilon =|;) (\d\.\d+)", text)]
    assert by_rdp <= shown[0] < by_rdp + 0.001 and by_pld <= shown[1] < by_pld + 0.001
    for words in [
        "delta = 1e-05",
        "RDP",
        "PLD",
        "one training example",
        "added or removed",
        "Gaussian noise of 1.1 times",
        "14100 updates",
        "Poisson",
        "256/60000",
        "loss, metrics and gradient norms",
        "hyperparameters",
        "early stopping",
        "checkpoint",
        "momentum, Adam or LAMB do not change epsilon",
    ]:
        assert words in text, words
    assert "\n" not in text and "NOT PRIVATE" not in text and "weak" not in text


@pytest.mark.parametrize(
    "epsilon, shown",
    [(2.59641, "2.597"), (0.0123411, "0.01235"), (66416.546, "66417"), (1e-6, "1e-06"), (0, "0")],
)
def test_statement_never_understates_epsilon(epsilon, shown):
    assert _shown(epsilon) == shown


def test_statement_for_other_batches():
    text = privacy_statement(epochs=3, sampling="shuffle", **RUN)
    assert "zero-out" in text and "No amplification" in text and "each of 3 epochs" in text
    assert "Poisson" not in text and "705 updates" in text
    run = RUN | {"batch_size": 60000, "noise_multiplier": 20.0}
    text = privacy_statement(steps=1, sampling="full_batch", **run)
    assert "every update uses all 60000 examples" in text and "1 update," in text


def test_statement_without_noise_is_loud():
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        text = privacy_statement(epochs=1, **(RUN | {"noise_multiplier": 0.0}))
    assert text.startswith("NOT PRIVATE: epsilon is infinite")


def test_statement_says_when_epsilon_is_weak():
    text = privacy_statement(steps=10000, **(RUN | {"noise_multiplier": 0.5}))
    assert "weak" in text


def test_statement_leaves_out_a_slow_pld():
    run = RUN | {"num_examples": 10**9, "noise_multiplier": 0.3, "delta": 1e-10}
    phase = Phase(steps=10**4, **{k: v for k, v in run.items() if k != "delta"})
    assert not Spent([phase]).pld_is_quick(run["delta"])
    assert "PLD" not in privacy_statement(steps=10**4, **run)


def test_the_report_is_json_and_agrees_with_the_functions():
    report = privacy_report(epochs=60, group_size=3, **RUN)
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    assert report["epsilon_rdp"] == compute_epsilon(epochs=60, **RUN)
    assert report["epsilon_pld"] == compute_epsilon(epochs=60, accountant="pld", **RUN)
    assert report["group"]["epsilon_rdp"] == compute_epsilon(epochs=60, group_size=3, **RUN)
    assert report["private"] and report["delta"] == 1e-5 and 1 < report["rdp_order"] < 60
    assert report["statement"] == privacy_statement(epochs=60, group_size=3, **RUN)
    assert [Phase.from_dict(p).steps for p in report["phases"]] == [14100]
    assert set(report["versions"]) == {"keras_dp", "dp-accounting"}


def test_a_report_without_noise_promises_nothing():
    report = quietly(privacy_report, epochs=1, group_size=2, **(RUN | {"noise_multiplier": 0}))
    assert not report["private"] and report["epsilon_rdp"] is None
    assert report["epsilon_pld"] is None and report["group"]["epsilon_rdp"] is None
    assert report["statement"].startswith("NOT PRIVATE")
    assert "For a person with 2 examples nothing is promised" in report["statement"]
    json.dumps(report, allow_nan=False)


def test_a_report_before_the_first_update():
    report = report_of_phases([Training(**RUN).phase(0)], 1e-5)
    assert report["private"] and report["epsilon_rdp"] == 0.0
    assert "epsilon = 0 at" in report["statement"] and "0 updates" in report["statement"]


def test_statement_for_users():
    text = privacy_statement(epochs=1, unit="user", examples_per_user=4, **RUN)
    assert "one user, who counts with at most 4 examples in an update" in text
    assert "by one user that is added or removed" in text
    assert "clipped per-user gradients" in text and "draws each user" in text
    assert "per-example" not in text
    with pytest.raises(ValueError, match="examples_per_user=4 with unit='example'"):
        privacy_statement(epochs=1, examples_per_user=4, **RUN)


def test_statement_for_groups():
    text = privacy_statement(epochs=60, group_size=3, **RUN)
    epsilon = compute_epsilon(epochs=60, group_size=3, **RUN)
    assert f"For a person with up to 3 examples, epsilon = {_shown(epsilon)} at" in text
    text = privacy_statement(epochs=60, group_size=2, neighboring_relation="replace_one", **RUN)
    assert "by the general rule for groups, which is loose" in text
    assert "any other one replaces" in text and "half the sensitivity" in text


@needs_truncation
def test_statement_for_truncated_draws():
    text = privacy_statement(epochs=1, capacity=300, **RUN)
    assert "draws of more than 300 are cut to it at random" in text


def test_statement_for_draws_without_replacement():
    text = privacy_statement(epochs=1, sampling="without_replacement", **RUN)
    assert "draws exactly 256 of 60000 examples" in text and "any other one replaces" in text


def test_statement_of_several_phases():
    phases = [Training(**RUN).phase(100), Training(**RUN, sampling="shuffle").phase(470)]
    text = statement_of_phases(phases, 1e-5)
    epsilon = epsilon_of_phases(phases, 1e-5)
    assert f"epsilon = {_shown(epsilon)} at delta = 1e-05 by Renyi DP" in text
    assert "Mechanism in phase 1 of 2: 100 updates" in text
    assert "Sampling assumed in phase 2 of 2: fixed batches" in text and "zero-out" in text
    with pytest.raises(ValueError, match="different units"):
        statement_of_phases([phases[0], Training(**RUN, unit="user").phase(1)], 1e-5)
    with pytest.raises(ValueError, match="received no phases"):
        statement_of_phases([], 1e-5)


@pytest.mark.parametrize("value", [1, 0, -2, 2.0, True, "2"])
def test_bad_group_sizes(value):
    with pytest.raises(ValueError, match=f"group_size must be.*{value!r}"):
        privacy_report(epochs=1, group_size=value, **RUN)


def test_no_central_limit_figure_is_offered():
    with pytest.raises(ValueError, match="accountant must be one of 'rdp', 'pld'"):
        compute_epsilon(epochs=1, accountant="gdp", **RUN)
    assert "GDP" not in privacy_statement(epochs=1, **RUN)
