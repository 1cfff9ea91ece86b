"""The guarantee in words and numbers."""

import re

import pytest

from keras_dp.accounting import (
    Phase,
    compute_epsilon,
    privacy_statement,
)
from keras_dp.accounting.composition import Spent
from keras_dp.accounting.statement import _shown
from tests.accounting.runs import RUN


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
