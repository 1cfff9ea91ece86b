"""What phases cost together, against closed forms and other accountants."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld as dp_accounting_pld
from dp_accounting import rdp as dp_accounting_rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dp import renyi
from keras_dp.accounting import Phase, compute_epsilon, epsilon_of_phases
from keras_dp.accounting.composition import Spent
from tests.accounting.runs import RUN, Training, gaussian_epsilon, quietly


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


@pytest.mark.parametrize("q", [(1, 1000), (1, 50), (1, 3)])
@pytest.mark.parametrize("sigma", [0.7, 2.0, 15.0])
def test_never_above_dp_accounting(q, sigma):
    """Its RDP accountant gives an upper bound too, and a looser one where its series is poor."""
    batch_size, num_examples = q
    event = dp_accounting.PoissonSampledDpEvent(
        batch_size / num_examples, dp_accounting.GaussianDpEvent(sigma)
    )
    for steps in (1, 100, 10000):
        accountant = dp_accounting_rdp.RdpAccountant().compose(event, steps)
        ours = Training(num_examples, batch_size, sigma, 1e-6).epsilon(steps)
        assert ours <= accountant.get_epsilon(1e-6) * (1 + 1e-7)


def test_shuffling_is_not_amplified():
    """One release for each epoch that was begun, whatever the batch size."""
    curve = Training(1000, 100, 2.0, 1e-5, "shuffle")
    one = compute_epsilon(
        num_examples=1000,
        batch_size=1000,
        noise_multiplier=2.0,
        delta=1e-5,
        steps=1,
        sampling="full_batch",
    )
    assert [curve.epsilon(steps) for steps in (1, 9, 10)] == [one] * 3
    assert curve.epsilon(11) == curve.epsilon(20) > one
    assert curve.epsilon(10, epochs_begun=1) == one
    assert curve.epsilon(10, epochs_begun=2) == curve.epsilon(20)
    assert curve.epsilon(25, epochs_begun=2) == curve.epsilon(30)


def test_epochs_begun_do_not_matter_to_poisson_sampling():
    curve = Training(1000, 100, 2.0, 1e-5)
    assert curve.epsilon(10, epochs_begun=7) == curve.epsilon(10)


def test_curve_equals_compute_epsilon():
    curve = Training(60000, 256, 1.1, 1e-5, "poisson")
    assert curve.epsilon(0) == 0.0
    for steps in (1, 235, 14062, 10**7):
        expected = quietly(compute_epsilon, steps=steps, **RUN)
        assert curve.epsilon(steps) == pytest.approx(expected, rel=1e-9)


def test_divergences_are_found_once_in_a_process():
    curve = Training(60000, 256, 1.1234, 1e-5)
    found = renyi.divergences.cache_info().misses
    for steps in range(1, 50):
        curve.epsilon(steps)
    assert renyi.divergences.cache_info().misses == found + 1


LOG_SIGMA = st.floats(-165, 165).map(lambda x: 10.0**x) | st.floats(0.03, 50.0)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_examples=st.integers(1, 10**12),
    ratio=st.floats(0, 1),
    sigmas=st.tuples(LOG_SIGMA, LOG_SIGMA),
    steps=st.tuples(st.integers(1, 10**9), st.integers(1, 10**4)),
    log_delta=st.floats(-20, -0.01),
    sampling=st.sampled_from(["poisson", "poisson", "shuffle"]),
)
def test_epsilon_is_positive_and_monotone(num_examples, ratio, sigmas, steps, log_delta, sampling):
    batch_size = max(1, int(num_examples**ratio))
    delta = 10.0**log_delta
    curves = [Training(num_examples, batch_size, s, delta, sampling) for s in sorted(sigmas)]
    epsilons = [[curve.epsilon(n) for n in sorted(steps)] for curve in curves]
    for row in epsilons:
        assert 0 < row[0] <= row[1]
    for less_noise, more_noise in zip(*epsilons):
        assert more_noise <= less_noise * (1 + 1e-7)


def test_more_noise_than_any_step_needs_is_still_an_upper_bound():
    """dp-accounting says 0 from a noise multiplier of about 1e5 on; the exact value is known."""
    curve = Training(100, 100, 1e6, 1e-5)
    steps = 10**12
    exact = gaussian_epsilon(1e6, steps, 1e-5)
    assert exact <= curve.epsilon(steps) <= exact * 1.3


def test_sampling_too_rare_for_a_float_is_not_free():
    curve = Training(10**400, 1, 1.0, 1e-5)
    assert 0 < curve.epsilon(10) < Training(100, 1, 1.0, 1e-5).epsilon(10)
    assert curve.epsilon(10**400) >= curve.epsilon(10)


@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_curve_refuses_bad_counts(value):
    curve = Training(60000, 256, 1.1, 1e-5, "shuffle")
    with pytest.raises(ValueError, match="steps must be"):
        curve.epsilon(value)
    with pytest.raises(ValueError, match="epochs_begun must be"):
        curve.epsilon(1, epochs_begun=value)


def test_golden_value_that_orders_below_those_of_dp_accounting_improve():
    """66416.546 by dp-accounting 0.6.0, whose smallest order is 1.1; the divergence jumps there."""
    curve = Training(60000, 250, 0.1, 1e-5)
    rdp = np.where(renyi.ORDERS < 1.1, np.inf, Spent([curve.phase(14400)]).rdp)
    assert renyi.epsilon_of(rdp, 1e-5) == pytest.approx(66416.546, rel=1e-6)
    # The mean of the privacy loss, order 1, is a lower bound of where epsilon can be.
    least = 14400 * renyi.sampled_gaussian_divergence(250 / 60000, 0.1, 1.000001)
    assert least < curve.epsilon(14400) < 2 * least


def gaussian(sigma, steps):
    return Phase(
        num_examples=100,
        batch_size=100,
        noise_multiplier=sigma,
        sampling="full_batch",
        steps=steps,
    )


def test_phases_of_different_noise_are_one_gaussian():
    """The precisions add up; the exact epsilon of the sum is Balle and Wang's."""
    phases = [gaussian(5.0, 4), gaussian(20.0, 100), gaussian(8.0, 1)]
    precision = 4 / 5**2 + 100 / 20**2 + 1 / 8**2
    exact = gaussian_epsilon(1 / math.sqrt(precision), 1, 1e-5)
    assert exact <= epsilon_of_phases(phases, 1e-5, "pld") <= exact * 1.001
    assert exact <= epsilon_of_phases(phases, 1e-5) <= exact * 1.3


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_phase_is_the_sum_of_its_parts_in_any_order(accountant):
    training = Training(1000, 50, 1.2, 1e-5)
    other = Training(400, 100, 3.0, 1e-5).phase(70)  # another part of the data
    whole = epsilon_of_phases([training.phase(100), other], 1e-5, accountant)
    parts = [training.phase(30), other, training.phase(70), training.phase(0)]
    assert epsilon_of_phases(parts, 1e-5, accountant) == pytest.approx(whole, rel=1e-9)
    for phases in ([training.phase(100)], [other]):
        assert epsilon_of_phases(phases, 1e-5, accountant) < whole


def test_different_phases_by_pld_are_tighter_than_by_rdp_and_close_to_dp_accounting():
    phases = [Training(1000, 50, 1.2, 1e-5).phase(100), Training(1000, 900, 9.0, 1e-5).phase(20)]
    phases.append(Training(1000, 100, 8.0, 1e-5, "shuffle").phase(20))
    accountant = dp_accounting_pld.PLDAccountant(
        dp_accounting.NeighboringRelation.REPLACE_SPECIAL, 1e-4
    )
    for phase in phases:
        accountant.compose(phase.event)
    found = epsilon_of_phases(phases, 1e-5, "pld")
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
    assert found < epsilon_of_phases(phases, 1e-5)


def test_nothing_was_spent_by_no_updates():
    for phases in ([], [Training(1000, 50, 1.2, 1e-5).phase(0)]):
        assert [epsilon_of_phases(phases, 1e-5, a) for a in ("rdp", "pld")] == [0.0, 0.0]


@pytest.mark.parametrize("phases", [None, 3, "phase", [None], [{"steps": 1}]])
def test_other_things_than_phases_are_refused(phases):
    with pytest.raises(ValueError, match="phases must be a list of keras_dp.accounting.Phase"):
        epsilon_of_phases(phases, 1e-5)


@pytest.mark.parametrize("delta", [0, 1, -1, 2, math.nan, math.inf, True, "1e-5", None])
def test_bad_deltas(delta):
    with pytest.raises(ValueError, match="delta must be"):
        epsilon_of_phases([gaussian(1.0, 1)], delta)


def test_the_best_order_is_inside_the_range_for_the_epsilons_that_people_use():
    for sigma, steps in ((0.3, 1000), (0.6, 20000), (1.1, 10), (3.0, 100), (20.0, 1000)):
        spent = Spent([Training(10000, 100, sigma, 1e-6).phase(steps)])
        order, at_edge = renyi.best_order(spent.rdp, 1e-6)
        assert not at_edge, (sigma, steps, order)
    order, at_edge = renyi.best_order(Spent([gaussian(1e5, 1)]).rdp, 1e-6)
    assert at_edge and order == renyi.ORDERS[-1]
