"""Privacy loss distributions: sound, and not tried where they cannot be."""

import dp_accounting
import pytest
from dp_accounting import pld as dp_accounting_pld

from tests.accounting.runs import Training, gaussian_epsilon


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def test_pld_composes_sampled_releases_soundly():
    """With q near 1 the sampled mechanism is almost the unsampled one, whose epsilon is exact."""
    curve = Training(10**9, 10**9 - 1, 30.0, 1e-6)
    assert isinstance(curve.phase(1).release, dp_accounting.PoissonSampledDpEvent)
    for steps in (100, 10000):
        exact = gaussian_epsilon(30.0, steps, 1e-6)
        assert exact * (1 - 1e-6) <= curve.pld_epsilon(steps) <= exact * 1.01


def test_pld_falls_back_to_rdp_where_it_cannot_be_sound():
    curve = Training(60000, 256, 1.1, 1e-13)
    assert curve.pld_epsilon(100) == curve.epsilon(100)  # tails are cut at 1e-15
    curve = Training(60000, 256, 1.1, 2e-12)
    assert curve.pld_epsilon(5000) == curve.epsilon(5000)  # FFT errors reach 1e-13
    curve = Training(60000, 256, 0.1, 1e-5)
    assert curve.pld_epsilon(14400) == curve.epsilon(14400)  # the grid would not fit


def test_pld_does_not_try_what_takes_minutes(monkeypatch):
    composed = []
    monkeypatch.setattr(
        dp_accounting_pld.PLDAccountant, "compose", lambda self, *event: composed.append(event)
    )
    curve = Training(10**6, 1000, 3.0, 1e-4)
    steps = 2 * 10**6
    assert curve.pld_epsilon(steps + 1) == curve.epsilon(steps + 1) > 1
    assert not composed
    curve.pld_epsilon(steps)
    assert len(composed) == 1


def test_pld_falls_back_to_rdp_where_dp_accounting_refuses_the_grid(monkeypatch):
    curve = Training(60000, 256, 1.1, 1e-5)
    message = "deltas are not in non-increasing order: deltas=[0.5 0.5]."

    def refuse(self, event, count):
        raise ValueError(message)

    monkeypatch.setattr(dp_accounting_pld.PLDAccountant, "compose", refuse)
    assert curve.pld_epsilon(100) == curve.epsilon(100)
    message = "something else"
    with pytest.raises(ValueError, match="something else"):
        curve.pld_epsilon(100)


def test_pld_leaves_room_for_the_errors_of_the_convolution(monkeypatch):
    asked = []
    get_epsilon = dp_accounting_pld.PLDAccountant.get_epsilon
    monkeypatch.setattr(
        dp_accounting_pld.PLDAccountant,
        "get_epsilon",
        lambda self, delta: asked.append(delta) or get_epsilon(self, delta),
    )
    Training(60000, 256, 1.1, 1e-5).pld_epsilon(1000)
    assert 1e-14 < 1e-5 - asked[0] < 1e-11
