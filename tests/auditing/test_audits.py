"""Audits of the real pipeline: honest, it stays under its claim; broken copies are caught.

All randomness, of coins, batches and noise, is drawn from ``os.urandom``, which is made repeatable
here: what fails fails every time.
"""

import os
import random

import keras
import numpy as np
import pytest

import keras_dp
from keras_dp import auditing
from keras_dp.clipping import clip
from keras_dp.optimizers.base import DPOptimizer
from keras_dp.sampling import poisson

DELTA = 1e-5


@pytest.fixture(autouse=True)
def _repeatable(monkeypatch):
    monkeypatch.setattr(os, "urandom", random.Random(8).randbytes)


def regression(batch_size, noise_multiplier, optimizer=keras_dp.DPSGD, **kwargs):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(
        optimizer(
            0.1,
            l2_norm_clip=0.5,
            noise_multiplier=noise_multiplier,
            batch_size=batch_size,
            **kwargs,
        ),
        loss="mse",
    )
    return model


def examples(number):
    x = np.random.default_rng(0).normal(size=(number, 4)).astype("float32")
    return x, x.sum(1, keepdims=True)


def many_runs(batch_size=5, noise_multiplier=1.0, steps=2, runs=100, rows=4, **kwargs):
    """Of 5 examples, all in every batch by default: mu is sqrt(steps) / noise_multiplier."""
    model = regression(batch_size, noise_multiplier)
    return auditing.audit_many_runs(
        model, *examples(rows), runs=runs, steps=steps, delta=DELTA, **kwargs
    )


def many_sampled_runs():
    """Each of 200 examples is in a batch with probability 1 / 50."""
    return many_runs(batch_size=4, rows=199, steps=4, runs=80)


def one_run(batch_size=1100, noise_multiplier=2.0, steps=1, canaries=1000, rows=100, **kwargs):
    """All examples are in every batch by default."""
    model = regression(batch_size, noise_multiplier)
    return auditing.audit_one_run(
        model, *examples(rows), steps=steps, delta=DELTA, canaries=canaries, **kwargs
    )


def one_sampled_run():
    return one_run(batch_size=500, rows=4500, canaries=500, steps=40)


def halve_the_noise(monkeypatch):
    whole = DPOptimizer.noise_stddev
    monkeypatch.setattr(DPOptimizer, "noise_stddev", property(lambda self: whole.fget(self) / 2))


def do_not_clip(monkeypatch):
    monkeypatch.setitem(clip.CLIPPINGS, "flat", lambda norms, bound: norms / norms)


def draw_the_same_every_time(monkeypatch):
    def last(generator, num_units, probability):
        return np.arange(num_units - round(num_units * probability), num_units)

    monkeypatch.setattr(poisson, "poisson_indices", last)


def test_many_runs_stay_under_the_claim_and_come_close():
    audit = many_runs()
    assert audit.is_gaussian
    assert audit.claimed_epsilon == pytest.approx(
        keras_dp.compute_epsilon(
            num_examples=5,
            batch_size=5,
            noise_multiplier=1.0,
            steps=2,
            delta=DELTA,
            sampling="full_batch",
            accountant="pld",
        )
    )
    assert audit.epsilon() <= audit.gaussian_epsilon() <= audit.claimed_epsilon
    assert audit.gaussian_epsilon(0.5) > 0.6 * audit.claimed_epsilon
    assert not audit.refutes_claim()
    assert "does not refute" in str(audit)


def test_one_run_stays_under_the_claim_and_sees_something():
    audit = one_run()
    assert 0.3 < audit.epsilon() <= audit.claimed_epsilon
    assert audit.gaussian_epsilon() <= audit.claimed_epsilon
    assert not audit.refutes_claim()


@pytest.mark.parametrize("audited", [many_sampled_runs, one_sampled_run])
def test_sampled_runs_stay_under_the_claim(audited):
    audit = audited()
    assert audit.phase.sampling == "poisson"
    assert audit.epsilon() <= audit.claimed_epsilon
    assert not audit.refutes_claim()


@pytest.mark.parametrize(
    ("damage", "audited"),
    [
        (halve_the_noise, many_runs),
        (do_not_clip, one_run),
        (draw_the_same_every_time, many_sampled_runs),
        (draw_the_same_every_time, one_sampled_run),
    ],
)
def test_a_broken_copy_is_caught(monkeypatch, damage, audited):
    damage(monkeypatch)
    audit = audited()
    assert audit.refutes_claim(0.95)
    assert "REFUTES" in str(audit)


def test_one_run_shows_that_the_noise_was_halved(monkeypatch):
    """By far in the estimate; the bound of one run is about half of the truth."""
    halve_the_noise(monkeypatch)
    audit = one_run()
    assert audit.gaussian_epsilon() > audit.claimed_epsilon


@pytest.mark.parametrize("adversary", ["white_box", "black_box"])
def test_canaries_of_ones_own(adversary):
    """Targets that are wrong: without noise the model learns those that are in, so they are
    told; the weights and the optimizer's state end as they began."""
    rng = np.random.default_rng(1)
    wide = rng.normal(size=(40, 1000)).astype("float32")
    model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1)])
    optimizer = keras_dp.DPMomentum(
        0.01, momentum=0.9, l2_norm_clip=1.0, noise_multiplier=0.05, batch_size=50
    )
    model.compile(optimizer, loss="mse")
    before = model.get_weights()
    audit = auditing.audit_one_run(
        model,
        rng.normal(size=(10, 1000)).astype("float32"),
        np.zeros((10, 1), "float32"),
        canaries=(wide, np.full((40, 1), 30.0, "float32")),
        adversary=adversary,
        steps=10,
        delta=DELTA,
    )
    report = auditing.attack_report(adversary, audit.scores, audit.included)
    assert report.auc > 0.95
    assert 0 < audit.epsilon() <= audit.claimed_epsilon
    for old, new in zip(before, model.get_weights()):
        np.testing.assert_array_equal(old, new)
    assert int(optimizer.iterations) == 0 and model.optimizer is optimizer


def test_white_box_scores_are_inner_products_with_the_clipped_gradients():
    """One update without noise on canaries alone: score i is <g_i, lr / B sum_j g_j>."""
    model = regression(batch_size=6, noise_multiplier=0.0)
    x, y = examples(6)
    kernel, bias = model.get_weights()
    residual = 2 * (x @ kernel + bias - y)
    gradients = np.concatenate([residual * x, residual], 1)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    clipped = gradients * np.minimum(1, 0.5 / norms)
    audit = auditing.audit_one_run(
        model, x[:2], y[:2], canaries=(x[2:], y[2:]), steps=1, delta=DELTA, num_guesses=2
    )
    taken = np.concatenate([[True, True], audit.included])
    update = 0.1 / 6 * clipped[taken].sum(0)
    np.testing.assert_allclose(audit.scores, clipped[2:] @ update, atol=1e-6)


def test_one_canary_of_ones_own_in_many_runs():
    far = (np.full((1, 4), 100.0, "float32"), np.full((1, 1), -1e4, "float32"))
    audit = many_runs(runs=60, noise_multiplier=0.5, steps=1, canary=far, adversary="black_box")
    assert 0 < audit.epsilon() <= audit.gaussian_epsilon() <= audit.claimed_epsilon
    assert audit.scores_with.shape == audit.scores_without.shape == (60,)


def test_several_inputs_and_outputs():
    """Worst-case canaries beside a model of two inputs and two outputs, by another optimizer."""
    inputs = {name: keras.Input((size,), name=name) for name, size in (("a", 3), ("b", 2))}
    joined = keras.layers.Concatenate()(list(inputs.values()))
    outputs = [keras.layers.Dense(1)(joined), keras.layers.Dense(4)(joined)]
    model = keras.Model(inputs, outputs)
    model.compile(
        keras_dp.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=0.3, batch_size=108),
        loss=["mse", keras.losses.SparseCategoricalCrossentropy(from_logits=True)],
    )
    rng = np.random.default_rng(0)
    x = {"a": rng.normal(size=(8, 3)), "b": rng.normal(size=(8, 2))}
    y = [rng.normal(size=(8, 1)), rng.integers(0, 4, 8)]
    audit = auditing.audit_one_run(model, x, y, steps=2, canaries=100, delta=DELTA)
    assert auditing.attack_report("worst case", audit.scores, audit.included).auc > 0.99
    assert 0.3 < audit.epsilon() <= audit.claimed_epsilon


def test_trainings_begin_from_the_same_weights():
    """One example of one's own, one update without noise: all trainings are the same."""
    x, y = examples(2)
    audit = many_runs(
        batch_size=3, noise_multiplier=0.0, rows=2, runs=8, steps=1, canary=(x[:1], -y[:1])
    )
    assert audit.scores_with[0] != 0 and np.ptp(audit.scores_with) == 0


def test_trainings_have_no_noise_in_common(capsys):
    audit = many_runs(runs=20, steps=1, verbose=1)
    scores = np.concatenate([audit.scores_with, audit.scores_without])
    assert len(np.unique(scores)) == 40
    assert "40/40" in capsys.readouterr().out


@pytest.mark.parametrize("adversary", ["white_box", "black_box"])
def test_worst_case_scores_are_the_updates(adversary):
    """Without noise: three updates of C / B for what is in, none for what is out."""
    audit = one_run(
        noise_multiplier=0.0, batch_size=10, canaries=8, rows=2, steps=3, adversary=adversary
    )
    step = 0.5 / 10 * (0.1 if adversary == "black_box" else 1.0)
    np.testing.assert_allclose(audit.scores, 3 * step * audit.included, atol=1e-7)
    assert audit.claimed_epsilon == np.inf and not audit.refutes_claim()


def test_few_canaries_say_little():
    x, y = examples(6)
    audit = auditing.audit_one_run(
        regression(6, 1.0), x[:2], y[:2], canaries=(x[2:], y[2:]), steps=1, delta=DELTA
    )
    assert audit.epsilon() == audit.gaussian_epsilon() == 0


def test_errors():
    x, y = examples(4)
    arguments = {"steps": 1, "delta": DELTA}
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    plain.compile("sgd", loss="mse")
    with pytest.raises(ValueError, match="a DP optimizer of keras_dp; received SGD"):
        auditing.audit_one_run(plain, x, y, **arguments)
    model = regression(4, 1.0)
    for changes, message in (
        ({"adversary": "grey"}, "adversary must be one of"),
        ({"steps": 0}, "steps must be a whole number"),
        ({"delta": 2.0}, "delta must be"),
        ({"canaries": 0}, "canaries must be a whole number"),
        ({"canaries": (x,)}, "canaries must be a pair"),
        ({"canaries": (x, y[:2])}, r"at least one; received \[2, 4\]"),
        ({"canaries": (x[:, :2], y)}, "the structure and the shapes of x and y"),
    ):
        with pytest.raises(ValueError, match=message):
            auditing.audit_one_run(model, x, y, **(arguments | changes))
    with pytest.raises(ValueError, match="x has 2 arrays, and the model 1 inputs"):
        auditing.audit_one_run(model, [x, x], y, **arguments)
    with pytest.raises(ValueError, match="canary must be one example"):
        auditing.audit_many_runs(model, x, y, canary=(x, y), runs=8, **arguments)
    with pytest.raises(ValueError, match="gradient_accumulation_steps=2"):
        accumulated = regression(4, 1.0, gradient_accumulation_steps=2)
        auditing.audit_one_run(accumulated, x, y, **arguments)


def test_a_model_without_inputs_takes_examples_only():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    model = Subclassed()
    model.compile(
        keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4), loss="mse"
    )
    x, y = examples(4)
    with pytest.raises(ValueError, match="has no weights yet"):
        auditing.audit_one_run(model, x, y, steps=1, delta=DELTA)
    model(x)
    with pytest.raises(ValueError, match="examples of your own as canaries="):
        auditing.audit_one_run(model, x, y, steps=1, delta=DELTA)
    audit = auditing.audit_one_run(model, x, y, steps=1, delta=DELTA, canaries=(x, -5 * y))
    assert np.all(audit.scores != 0)


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_a_convolutional_model_stays_under_its_claim(clipping):
    """Four updates of a small CNN, as sampled batches, from twenty thousand canaries."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(8, 3, activation="relu"),
            keras.layers.GroupNormalization(4),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    model.compile(
        keras_dp.DPSGD(
            0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=2100, clipping=clipping
        ),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1000, 8, 8, 1)).astype("float32"), rng.integers(0, 10, 1000)
    audit = auditing.audit_one_run(model, x, y, steps=4, delta=1e-6, canaries=20000)
    assert 0.2 < audit.epsilon() <= audit.claimed_epsilon
    assert audit.gaussian_epsilon() <= 1.1 * audit.claimed_epsilon


@pytest.mark.slow
def test_bounds_hold_as_often_as_they_say():
    """Of thirty honest audits, at 80 %, about a fifth may be above the true mu, which is 2."""
    audit = many_runs(runs=3000, noise_multiplier=0.5, steps=1)
    parts = zip(np.split(audit.scores_with, 30), np.split(audit.scores_without, 30))
    mus = [auditing.Errors(*part).mu(0.8) for part in parts]
    assert np.sum(np.array(mus) > 2) <= 0.2 * 30 + 3 * np.sqrt(0.16 * 30)
    assert np.median(mus) > 1
