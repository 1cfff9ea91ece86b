"""Solving for steps, epochs, batch size and delta: never above the target, and not far below."""

import inspect
import math
import random
import re
import warnings

import pytest

import keras_dp
from keras_dp.accounting import (
    Phase,
    compute_batch_size,
    compute_delta,
    compute_epochs,
    compute_epsilon,
    compute_noise_multiplier,
    compute_steps,
    epsilon_of_phases,
    most_steps,
)
from tests.accounting.runs import quietly


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


RUN = {"num_examples": 60000, "batch_size": 256, "noise_multiplier": 1.1, "delta": 1e-5}
SOLVERS = {
    compute_steps: RUN,
    compute_epochs: RUN,
    compute_batch_size: {k: v for k, v in (RUN | {"epochs": 5}).items() if k != "batch_size"},
    compute_delta: {k: v for k, v in (RUN | {"epochs": 5}).items() if k != "delta"},
    compute_noise_multiplier: {
        k: v for k, v in (RUN | {"epochs": 5}).items() if k != "noise_multiplier"
    },
}


def random_run(rng):
    """A training and an epsilon that it stays within, by a margin that is random too."""
    num_examples = int(10 ** rng.uniform(2, 7))
    run = {
        "num_examples": num_examples,
        "batch_size": max(1, int(num_examples * 10 ** rng.uniform(-3, 0))),
        "noise_multiplier": 10 ** rng.uniform(-0.3, 1.3),
        "delta": min(10 ** rng.uniform(-10, -3), 0.5 / num_examples),
        "sampling": rng.choice(["poisson", "poisson", "shuffle"]),
        "neighboring_relation": rng.choice([None, None, "replace_one"]),
    }
    one = quietly(compute_epsilon, epochs=1, **run)
    return run, one * 10 ** rng.uniform(0.01, 1)


def without(run, name):
    return {key: value for key, value in run.items() if key != name}


def test_solutions_stay_within_the_target_and_use_it():
    rng = random.Random(1)
    for number in range(100):
        run, target = random_run(rng)
        steps = quietly(compute_steps, target_epsilon=target, **run)
        assert quietly(compute_epsilon, steps=steps, **run) <= target, run
        assert quietly(compute_epsilon, steps=steps + 1, **run) > target, run

        epochs = quietly(compute_epochs, target_epsilon=target, **run)
        assert quietly(compute_epsilon, epochs=epochs, **run) <= target, run
        assert quietly(compute_epsilon, epochs=epochs + 1, **run) > target, run

        rest = without(run, "delta")
        delta = quietly(compute_delta, target_epsilon=target, steps=steps, **rest)
        assert delta <= run["delta"] * 1.01
        assert quietly(compute_epsilon, steps=steps, delta=delta, **rest) <= target, run
        if delta > 1e-299:
            smaller = quietly(compute_epsilon, steps=steps, delta=delta * 0.99, **rest)
            assert smaller > target, run

        if number % 10:
            continue  # these two find new divergences at every try
        rest = without(run, "batch_size") | {"steps": steps}
        size = quietly(compute_batch_size, target_epsilon=target, **rest)
        assert quietly(compute_epsilon, batch_size=size, **rest) <= target, run
        if size < run["num_examples"]:
            assert quietly(compute_epsilon, batch_size=size + 1, **rest) > target, run

        rest = without(run, "noise_multiplier") | {"steps": steps}
        sigma = quietly(compute_noise_multiplier, target_epsilon=target, **rest)
        assert sigma <= run["noise_multiplier"] * 1.0002
        assert quietly(compute_epsilon, noise_multiplier=sigma, **rest) <= target, run


@pytest.mark.parametrize("solver", SOLVERS)
def test_pld_allows_more(solver):
    target = 1.0
    quick = {"num_examples": 1000, "batch_size": 100, "noise_multiplier": 4.0, "delta": 1e-6}
    quick = {k: v for k, v in (quick | {"epochs": 10}).items() if k in SOLVERS[solver]}
    run = quick | {"target_epsilon": target}
    by_rdp, by_pld = (solver(accountant=a, **run) for a in ("rdp", "pld"))
    if solver in (compute_delta, compute_noise_multiplier):
        assert by_pld < by_rdp
    else:
        assert by_pld > by_rdp
    name = {
        compute_steps: "steps",
        compute_epochs: "epochs",
        compute_batch_size: "batch_size",
        compute_delta: "delta",
        compute_noise_multiplier: "noise_multiplier",
    }[solver]
    run = without(quick, name) | {name: by_pld}
    assert 0.9 * target < compute_epsilon(accountant="pld", **run) <= target


def test_a_batch_of_an_epoch_is_within_the_target_though_epsilon_is_not_monotone():
    for target in (0.5, 0.8, 1.3, 2.1):
        size = compute_batch_size(
            target_epsilon=target, num_examples=1000, noise_multiplier=2.0, delta=1e-5, epochs=3
        )
        run = {"num_examples": 1000, "noise_multiplier": 2.0, "delta": 1e-5, "epochs": 3}
        assert compute_epsilon(batch_size=size, **run) <= target
        assert compute_epsilon(batch_size=size + 1, **run) > target
        assert compute_epsilon(batch_size=int(size * 1.1) + 1, **run) > target


def test_what_was_spent_before_counts():
    before = Phase(num_examples=100, batch_size=100, noise_multiplier=9.0, steps=4)

    def after(steps):
        return [before, Phase(num_examples=1000, batch_size=50, noise_multiplier=1.5, steps=steps)]

    steps = most_steps(after, 4.0, 1e-5)
    assert epsilon_of_phases(after(steps), 1e-5) <= 4.0 < epsilon_of_phases(after(steps + 1), 1e-5)
    assert 0 < steps < most_steps(lambda steps: after(steps)[1:], 4.0, 1e-5)
    by_pld = most_steps(after, 4.0, 1e-5, "pld")
    assert by_pld > steps and epsilon_of_phases(after(by_pld), 1e-5, "pld") <= 4.0
    spent = epsilon_of_phases([before], 1e-5)
    for accountant in ("rdp", "pld"):
        assert most_steps(after, spent / 2, 1e-5, accountant) == 0
    assert most_steps(after, spent * (1 + 1e-9), 1e-5) == 0


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_ten_million_steps_large_epsilons_and_tiny_deltas(accountant):
    """Finite, monotone, and no search runs away."""
    run = RUN | {"accountant": accountant}
    epsilons = [quietly(compute_epsilon, steps=n, **run) for n in (10**6, 10**7, 10**8)]
    assert 1 < epsilons[0] < epsilons[1] < epsilons[2] < math.inf
    deltas = [1e-3, 1e-9, 1e-30, 1e-100, 1e-300]
    epsilons = [quietly(compute_epsilon, steps=10, **(run | {"delta": d})) for d in deltas]
    assert epsilons == sorted(epsilons) and math.isfinite(epsilons[-1])
    steps = quietly(compute_steps, target_epsilon=1e4, **run)
    assert 10**7 < steps < 10**12
    huge = run | {"noise_multiplier": 1e8}
    assert quietly(compute_steps, target_epsilon=100.0, **huge) > 10**15
    assert quietly(compute_steps, target_epsilon=1e200, **huge) >= 10**100


def test_targets_that_nothing_reaches():
    with pytest.raises(ValueError, match="Not one update stays within target_epsilon=1e-09.*costs"):
        compute_steps(target_epsilon=1e-9, **RUN)
    with pytest.raises(ValueError, match="Not one epoch stays within.*only [0-9]+ of its 235"):
        compute_epochs(target_epsilon=0.72, **RUN)
    with pytest.raises(ValueError, match="No batch_size stays within.*batch size of 1 costs"):
        compute_batch_size(target_epsilon=1e-9, **SOLVERS[compute_batch_size])
    with pytest.raises(ValueError, match="No delta below 1 reaches target_epsilon=1e-09"):
        compute_delta(target_epsilon=1e-9, **SOLVERS[compute_delta])
    with pytest.raises(ValueError, match="full_batch.*leaves no batch_size to choose"):
        compute_batch_size(target_epsilon=1.0, sampling="full_batch", **SOLVERS[compute_batch_size])


def test_a_delta_that_need_not_be_smaller():
    run = SOLVERS[compute_delta] | {"noise_multiplier": 1e5}
    assert compute_delta(target_epsilon=100.0, **run) == pytest.approx(1e-300)


@pytest.mark.parametrize("solver", [compute_steps, compute_epochs])
def test_no_noise_allows_nothing(solver):
    with (
        pytest.warns(UserWarning, match="NOT PRIVATE"),
        pytest.raises(ValueError, match="Not one update"),
    ):
        solver(target_epsilon=1e9, **(RUN | {"noise_multiplier": 0}))


def test_the_edge_of_the_orders_is_warned_about():
    run = {"num_examples": 100, "batch_size": 100, "steps": 1, "delta": 1e-6}
    with pytest.warns(UserWarning, match="best Renyi order, 16384, is at the edge") as record:
        compute_epsilon(noise_multiplier=1e5, **run)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_epsilon(noise_multiplier=100.0, **run)
        compute_epsilon(noise_multiplier=1e5, accountant="pld", **run)


WRONG = [math.nan, math.inf, -math.inf, -1, 0, True, "1", None, [1], 1j, object]
HUGE_AND_TINY = [10**400, 1e308, 5e-324, 0.5]
FUNCTIONS = [
    *SOLVERS,
    compute_epsilon,
    keras_dp.privacy_report,
    keras_dp.privacy_statement,
]


def arguments(function):
    """A valid call."""
    if function in SOLVERS:
        return SOLVERS[function] | {"target_epsilon": 2.0}
    return RUN | {"epochs": 5}


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("value", [*WRONG, *HUGE_AND_TINY], ids=lambda value: repr(value)[:9])
def test_bad_input(function, value):
    """Every number of every function: a result that is a bound, or an error that names it."""
    usual = arguments(function)
    names = ["num_examples", "batch_size", "noise_multiplier", "delta", "target_epsilon", "epochs"]
    for name in [name for name in names if name in usual]:
        try:
            result = quietly(function, **(usual | {name: value}))
        except ValueError as error:
            allowed = rf"{name}\b"
            if value in HUGE_AND_TINY:  # of the right kind, but nothing stays within the target
                allowed += "|target_epsilon="
            assert re.search(allowed, str(error)), (name, error)
        else:
            assert value in HUGE_AND_TINY or (name, value) == ("noise_multiplier", 0)
            if function is compute_epsilon:
                assert result > 0
            elif function in SOLVERS:
                assert math.isfinite(result) and result > 0


@pytest.mark.parametrize("function", FUNCTIONS)
def test_choices_are_checked_by_every_function(function):
    for name in ("sampling", "accountant", "neighboring_relation", "unit"):
        if name in inspect.signature(function).parameters:
            with pytest.raises(ValueError, match=f"{name} must be one of .*; received 'gdp'"):
                function(**(arguments(function) | {name: "gdp"}))


def test_public_names():
    for function in FUNCTIONS:
        assert getattr(keras_dp, function.__name__) is function
        assert function.__name__ in keras_dp.__all__
