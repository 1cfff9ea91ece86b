"""What holds for several examples of one person. The mechanism itself is in test_mechanisms.py."""

import math

import pytest

from keras_dp.accounting import Phase, compute_epsilon, epsilon_of_group, epsilon_of_phases
from keras_dp.accounting.groups import is_exact
from tests.accounting.runs import RUN, gaussian_epsilon

PHASE = {"num_examples": 1000, "batch_size": 20, "noise_multiplier": 2.0, "steps": 100}


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("more", [{}, {"sampling": "shuffle"}, {"sampling": "without_replacement"}])
def test_a_group_of_one_is_a_unit(accountant, more):
    phases = [Phase(**PHASE, **more)]
    assert epsilon_of_group(phases, 1e-5, 1, accountant) == epsilon_of_phases(
        phases, 1e-5, accountant
    )


def test_without_amplification_the_sensitivity_is_as_many_times_larger():
    phases = [Phase(**(PHASE | {"sampling": "shuffle", "noise_multiplier": 10.0}))]  # 2 epochs
    exact = gaussian_epsilon(10.0 / 5, 2, 1e-5)
    assert exact <= epsilon_of_group(phases, 1e-5, 5, "pld") <= exact * 1.001
    assert exact <= epsilon_of_group(phases, 1e-5, 5) <= exact * 1.3


@pytest.mark.parametrize("group_size", [2, 5])
def test_accountants_agree_on_poisson_groups_and_beat_the_general_rule(group_size):
    run = PHASE | {"batch_size": 200, "noise_multiplier": 10.0}  # PLD is quick there
    phases = [Phase(**run)]
    by_rdp, by_pld = (epsilon_of_group(phases, 1e-5, group_size, a) for a in ("rdp", "pld"))
    assert is_exact(phases, group_size)
    assert epsilon_of_phases(phases, 1e-5) < by_pld < by_rdp < by_pld * 1.3
    # The general rule: epsilon at this smaller delta, times the size of the group.
    replaced = [Phase(**run, neighboring_relation="replace_one")]
    assert not is_exact(replaced, group_size)
    assert by_rdp < epsilon_of_group(replaced, 1e-5, group_size)


def test_the_general_rule():
    phases = [Phase(**PHASE, neighboring_relation="replace_one")]
    epsilon = epsilon_of_group(phases, 1e-5, 3) / 3
    single = [d for d in (10.0 ** -(5 + i / 1000) for i in range(5000))]
    single = next(d for d in single if epsilon_of_phases(phases, d) >= epsilon * (1 - 1e-9))
    assert single * (1 + math.exp(epsilon) + math.exp(2 * epsilon)) <= 1e-5 * (1 + 1e-2)
    assert epsilon_of_group(phases, 1e-5, 1000) == math.inf  # nothing can be said


def test_epsilon_grows_with_the_group():
    epsilons = [compute_epsilon(steps=100, group_size=k, **RUN) for k in (1, 2, 3, 10)]
    assert epsilons == sorted(epsilons) and len(set(epsilons)) == 4


def test_no_updates_and_no_noise():
    assert epsilon_of_group([], 1e-5, 3) == 0.0
    assert epsilon_of_group([Phase(**(PHASE | {"noise_multiplier": 0}))], 1e-5, 3) == math.inf


@pytest.mark.parametrize("value", [0, -1, 1.5, math.nan, math.inf, True, "2", None])
def test_bad_group_sizes(value):
    with pytest.raises(ValueError, match="group_size must be"):
        epsilon_of_group([Phase(**PHASE)], 1e-5, value)
    with pytest.raises(ValueError, match="group_size must be"):
        compute_epsilon(steps=1, group_size=value, **RUN)
