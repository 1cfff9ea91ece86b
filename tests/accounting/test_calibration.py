"""Epsilon of a planned training and the settings for a target, against values from elsewhere."""

import math
import random
import re
import warnings

import numpy as np
import pytest

from keras_dp import accounting
from keras_dp.accounting import (
    compute_epsilon,
    compute_noise_multiplier,
    privacy_statement,
    steps_per_epoch,
)
from tests.accounting.runs import RUN, TARGET, Training, gaussian_epsilon, quietly


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


# Measured with dp-accounting 0.6.0 (RDP at its default orders; PLD on a grid of 1e-3), neighbours
# by adding or removing one example, Poisson sampling, before this package was written. The first
# eight are the cases that libraries for private training are usually quoted with, the next ones
# come from reports of wrong epsilons: a batch that is a sum over accumulation steps (1024/60000),
# an order just above 1, a central-limit figure of 1.83 where RDP says 2.169.
GOLDEN = [
    # batch_size, num_examples, sigma, steps, delta, RDP, PLD
    (256, 60000, 1.1, 234, 1e-5, 0.74023, None),
    (256, 60000, 1.1, 235, 1e-5, 0.74055, None),
    (256, 60000, 1.1, 2340, 1e-5, 1.09815, None),
    (256, 60000, 1.1, 14062, 1e-5, 2.59656, 2.39053),
    (250, 60000, 1.1, 480, 1e-5, 0.79577, None),
    (1024, 50000, 1.54, 1464, 1e-5, 2.60825, None),
    (1, 100, 1.0, 100, 1e-5, 1.21415, 0.71814),
    (1, 1, 1.0, 10, 1e-5, 19.05360, None),
    (1024, 60000, 1.1, 1000, 1e-5, 3.018, None),
    (256, 60000, 1.1, 4000, 1e-5, 1.357, None),
    (21, 20000, 1.0, 1, 1e-3, 0.2548, None),
    (1, 5, 3.0, 50, 1 / 48000, 2.169, 1.961),
]


@pytest.mark.parametrize("batch_size, num_examples, sigma, steps, delta, rdp, pld", GOLDEN)
def test_golden_values(batch_size, num_examples, sigma, steps, delta, rdp, pld):
    run = {
        "num_examples": num_examples,
        "batch_size": batch_size,
        "noise_multiplier": sigma,
        "delta": delta,
        "steps": steps,
    }
    decimals = 10.0 ** -len(str(rdp).split(".")[1]) / 2
    assert quietly(compute_epsilon, **run) == pytest.approx(rdp, rel=1e-6, abs=2 * decimals)
    if pld is not None:
        found = quietly(compute_epsilon, accountant="pld", **run)
        assert found == pytest.approx(pld, rel=0.005)
        assert found < rdp


@pytest.mark.parametrize("batch_size, num_examples", [(8, 100), (80, 1000)])
def test_golden_value_at_a_fractional_order(batch_size, num_examples):
    """6.34521 by dp-accounting 0.6.0, an upper bound there; 6.33960746 by Opacus 1.6.0."""
    run = {"num_examples": num_examples, "batch_size": batch_size, "noise_multiplier": 1.0}
    run |= {"steps": 100, "delta": 1e-5}
    assert quietly(compute_epsilon, **run) == pytest.approx(6.33960746, rel=1e-8)
    assert quietly(compute_epsilon, accountant="pld", **run) == pytest.approx(5.61345, rel=0.005)


def test_golden_calibration():
    """Measured with dp-accounting 0.6.0: target 3 after 14062 updates needs 1.01400."""
    sigma = compute_noise_multiplier(steps=14062, **TARGET)
    assert sigma == pytest.approx(1.01400, rel=1e-4)


@pytest.mark.parametrize("sampling", ["full_batch", "shuffle", "poisson"])
@pytest.mark.parametrize("sigma, releases", [(0.8, 1), (3.0, 4), (20.0, 10), (300.0, 100)])
def test_unsampled_gaussian_against_the_exact_epsilon(sampling, sigma, releases):
    run = {"num_examples": 500, "noise_multiplier": sigma, "delta": 1e-5, "sampling": sampling}
    # Every example takes part in `releases` updates: all of them, or one in each epoch.
    run |= {"batch_size": 100 if sampling == "shuffle" else 500, "epochs": releases}
    exact = gaussian_epsilon(sigma, releases, 1e-5)
    by_rdp = compute_epsilon(**run)
    by_pld = compute_epsilon(accountant="pld", **run)
    assert exact <= by_pld <= exact * 1.01
    assert exact <= by_rdp <= exact * 1.3
    assert by_pld < by_rdp


def test_batch_as_large_as_the_data_set_is_the_unsampled_gaussian():
    run = {"num_examples": 50, "batch_size": 50, "noise_multiplier": 1.0, "delta": 1e-3}
    samplings = ["poisson", "shuffle", "full_batch"]
    by_sampling = {s: compute_epsilon(steps=3, sampling=s, **run) for s in samplings}
    assert len(set(by_sampling.values())) == 1


def test_epoch_is_rounded_up():
    assert [steps_per_epoch(n, 32) for n in (32, 33, 64, 100)] == [1, 2, 2, 4]
    assert steps_per_epoch(10**18 + 1, 10**9) == 10**9 + 1  # not through floats
    assert compute_epsilon(epochs=2, **RUN) == compute_epsilon(steps=470, **RUN)
    assert compute_epsilon(epochs=2.0, **RUN) == compute_epsilon(steps=470, **RUN)
    assert compute_epsilon(epochs=np.int64(2), **RUN) == compute_epsilon(steps=470, **RUN)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle", "full_batch"])
@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_extreme_noise(sampling, accountant):
    """dp-accounting says 0 for little or much noise, or fails (measured with 0.6.0)."""
    batch_size = 1000 if sampling == "full_batch" else 10
    run = {"num_examples": 1000, "batch_size": batch_size, "steps": 100, "delta": 1e-5}
    run |= {"sampling": sampling, "accountant": accountant}

    def epsilon(sigma):
        return quietly(compute_epsilon, noise_multiplier=sigma, **run)

    sigmas = [5e-324, 1e-300, 1e-160, 1e-154, 1e-152, 1e-20, 1e-3, 1.0, 1e3]
    sigmas += [1e5, 1e6, 1e20, 1e153, 1e156, 1.7e308]
    epsilons = [epsilon(sigma) for sigma in sigmas]
    assert epsilons[0] == epsilons[1] == math.inf
    assert epsilons[7] < 1000 and 0 < epsilons[-1] < 0.01
    assert all(a >= b > 0 for a, b in zip(epsilons, epsilons[1:]))


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_more_steps_than_a_float_can_hold(sampling):
    run = {"num_examples": 60000, "batch_size": 256, "delta": 1e-5}
    run |= {"steps": 10**400, "sampling": sampling}
    for accountant in accounting.ACCOUNTANTS:
        epsilon = quietly(compute_epsilon, noise_multiplier=1.1, accountant=accountant, **run)
        assert 1e100 < epsilon < math.inf
        with pytest.raises(ValueError, match="No noise_multiplier reaches"):
            compute_noise_multiplier(target_epsilon=3.0, accountant=accountant, **run)
        compute_noise_multiplier(target_epsilon=1e200, accountant=accountant, **run)
    assert "weak" in privacy_statement(noise_multiplier=1.1, **run)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_no_noise_is_infinite_and_loud(accountant):
    run = RUN | {"noise_multiplier": 0, "steps": 1, "accountant": accountant}
    with pytest.warns(UserWarning, match="NOT PRIVATE") as record:
        assert compute_epsilon(**run) == math.inf
    assert len(record) == 1 and record[0].filename == __file__
    assert Training(60000, 256, 0.0, 1e-5).epsilon(1) == math.inf


def test_large_delta_is_warned_about():
    with pytest.warns(UserWarning, match="1 / num_examples") as record:
        compute_epsilon(**(RUN | {"delta": 1 / 60000, "steps": 1}))
    assert len(record) == 1 and record[0].filename == __file__
    with pytest.warns(UserWarning, match="1 / num_examples") as record:
        compute_noise_multiplier(**(TARGET | {"delta": 0.1, "steps": 1}))
    assert len(record) == 1 and record[0].filename == __file__


def test_large_epsilon_is_warned_about():
    with pytest.warns(UserWarning, match="4493.*next to no formal protection") as record:
        compute_epsilon(
            num_examples=60000, batch_size=250, noise_multiplier=0.1, delta=1e-5, steps=14400
        )
    assert record[0].filename == __file__


def test_an_ordinary_run_warns_about_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compute_epsilon(epochs=1, **RUN)
        compute_noise_multiplier(epochs=1, **TARGET)
        privacy_statement(epochs=1, **RUN)


NOT_COUNTS = [0, -1, 2.5, 256.0, math.nan, math.inf, True, "256", None, [256]]


NOT_NUMBERS = [math.nan, -0.1, math.inf, -math.inf, True, "1.0", None, [1.0], 1j, 10**400]


NOT_DELTAS = [0, 0.0, 1, 1.0, 2, -1e-5, math.nan, math.inf, -math.inf, True, "1e-5", None]


BAD = [
    *[("num_examples", value) for value in NOT_COUNTS],
    *[("batch_size", value) for value in [*NOT_COUNTS, 60001]],
    *[("noise_multiplier", value) for value in NOT_NUMBERS],
    *[("delta", value) for value in NOT_DELTAS],
    *[("steps", value) for value in NOT_COUNTS if value is not None],
    *[("sampling", value) for value in ["Poisson", "", None, 1, ["poisson"]]],
    *[("accountant", value) for value in ["prv", "gdp", None, 1]],
]


@pytest.mark.parametrize("name, value", BAD)
def test_bad_input(name, value):
    """The error names the argument and what was received, and every function raises it."""
    shown = re.escape(repr(value))
    with pytest.raises(ValueError, match=rf"(?s){name}.*{shown}"):
        compute_epsilon(**({"steps": 10} | RUN | {name: value}))
    if name != "noise_multiplier":
        with pytest.raises(ValueError, match=rf"(?s){name}.*{shown}"):
            compute_noise_multiplier(**({"steps": 10} | TARGET | {name: value}))
    if name != "accountant":
        with pytest.raises(ValueError, match=rf"(?s){name}.*{shown}"):
            privacy_statement(**({"steps": 10} | RUN | {name: value}))


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, True, "3", None])
def test_bad_target(value):
    with pytest.raises(ValueError, match=f"target_epsilon must be.*{value!r}"):
        compute_noise_multiplier(**(TARGET | {"target_epsilon": value, "steps": 10}))


@pytest.mark.parametrize("epochs", [0, -1, 0.5, 1.5, math.nan, math.inf, True, "3"])
def test_bad_epochs(epochs):
    with pytest.raises(ValueError, match=r"epochs must be.*steps="):
        compute_epsilon(epochs=epochs, **RUN)


@pytest.mark.parametrize("duration", [{}, {"epochs": 1, "steps": 235}])
def test_exactly_one_duration(duration):
    with pytest.raises(ValueError, match="Exactly one of epochs and steps"):
        compute_epsilon(**RUN, **duration)


def test_batch_larger_than_the_data_set_names_both():
    """A batch of 600 accumulated twice, of 1000 examples (FAILURES row 42)."""
    with pytest.raises(ValueError, match=r"batch_size=1200.*num_examples=1000"):
        steps_per_epoch(1000, 1200)


def test_full_batch_needs_the_whole_data_set():
    with pytest.raises(ValueError, match=r"batch_size=256 and num_examples=60000"):
        compute_epsilon(sampling="full_batch", steps=1, **RUN)


def test_numpy_numbers_are_numbers():
    run = {
        "num_examples": np.int64(60000),
        "batch_size": np.int32(256),
        "noise_multiplier": np.float32(1.5),
        "delta": np.float64(1e-5),
    }
    epsilon = compute_epsilon(steps=np.int64(235), **run)
    assert type(epsilon) is float
    assert epsilon == compute_epsilon(steps=235, **(RUN | {"noise_multiplier": 1.5}))
    assert compute_epsilon(steps=235, **(RUN | {"noise_multiplier": 2})) < epsilon


def random_target(rng):
    num_examples = int(10 ** rng.uniform(2, 7))
    sampling = rng.choice(["poisson", "shuffle", "full_batch"])
    ratio = 1.0 if sampling == "full_batch" else 10 ** rng.uniform(-4, 0)
    return {
        "num_examples": num_examples,
        "batch_size": max(1, int(num_examples * ratio)),
        "delta": min(10 ** rng.uniform(-10, -3), 0.5 / num_examples),
        "epochs": int(10 ** rng.uniform(0, 2)),
        "sampling": sampling,
        "target_epsilon": 10 ** rng.uniform(-0.7, 1.5),
    }


def test_calibration_never_exceeds_the_target_and_wastes_no_noise():
    rng = random.Random(0)
    for _ in range(100):
        target = random_target(rng)
        sigma = compute_noise_multiplier(**target)
        run = dict(target)
        limit = run.pop("target_epsilon")
        assert quietly(compute_epsilon, noise_multiplier=sigma, **run) <= limit, target
        assert quietly(compute_epsilon, noise_multiplier=sigma * 0.9995, **run) > limit, target


@pytest.mark.parametrize(
    "target, steps, sampling",
    [(3.0, 1000, "poisson"), (1.0, 200, "poisson"), (8.0, 470, "shuffle")],
)
def test_calibration_by_pld(target, steps, sampling):
    run = {"num_examples": 60000, "batch_size": 256, "delta": 1e-5, "accountant": "pld"}
    run |= {"steps": steps, "sampling": sampling}
    sigma = compute_noise_multiplier(target_epsilon=target, **run)
    assert compute_epsilon(noise_multiplier=sigma, **run) <= target
    assert compute_epsilon(noise_multiplier=sigma * 0.999, **run) > target
    assert sigma < compute_noise_multiplier(target_epsilon=target, **(run | {"accountant": "rdp"}))


@pytest.mark.parametrize("target", [1e-3, 1e3, 1e9, 1e60])
def test_calibration_of_unusual_targets(target):
    sigma = compute_noise_multiplier(steps=100, **(TARGET | {"target_epsilon": target}))
    epsilon = quietly(compute_epsilon, steps=100, noise_multiplier=sigma, **RUN_WITHOUT_NOISE)
    assert target * 0.99 <= epsilon <= target


RUN_WITHOUT_NOISE = {name: value for name, value in RUN.items() if name != "noise_multiplier"}


def test_impossible_target():
    with pytest.raises(ValueError, match=r"No noise_multiplier reaches target_epsilon=1e-07.*less"):
        compute_noise_multiplier(steps=100, **(TARGET | {"target_epsilon": 1e-7}))
    with pytest.raises(ValueError, match="Raise target_epsilon or delta"):
        compute_noise_multiplier(steps=1, **(TARGET | {"target_epsilon": 0.01, "delta": 1e-300}))
