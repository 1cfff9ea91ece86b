"""Several replicas protect as one device does: the noise, its copies, and the bound."""

import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from tests.distribution import running
from tests.fixtures import checks, zoo

LEARNING_RATE, CLIP, SIGMA = 0.5, 2.0, 3.0


@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_noise(replicas):
    """NOISE: once, of the size of one device, the same bits everywhere."""

    def make_optimizer():
        return keras_dp.DPSGD(
            LEARNING_RATE, l2_norm_clip=CLIP, noise_multiplier=SIGMA, batch_size=16
        )

    def fit(model, x, y):
        checks.fit(model, x, y)
        running.assert_copies_agree(model)

    with running.strategy(replicas).scope():
        checks.check_noise(make_optimizer, LEARNING_RATE * SIGMA * CLIP / 16, train=fit)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kwargs",
    [dict(backend="vectorized", microbatch_size=1), dict(gradient_accumulation_steps=2)],
    ids=str,
)
def test_noise_of_other_ways(kwargs):
    """No way to the clipped sum adds noise for each replica, microbatch or part."""

    def make_optimizer():
        return keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4, **kwargs)

    with running.strategy(4).scope():
        (update,) = checks.noise_steps(make_optimizer, steps=1, train=_fit_twice)
    spread = np.std(np.concatenate([kernel.ravel() for kernel in update]))
    updates = 1 if "gradient_accumulation_steps" in kwargs else 2
    assert abs(spread * 4 / np.sqrt(updates) - 1) < 0.003


def _fit_twice(model, x, y):
    model.fit(np.concatenate([x, x]), np.concatenate([y, y]), batch_size=2, verbose=0)


def test_the_noise_does_not_depend_on_the_number_of_replicas():
    def make_optimizer():
        with pytest.warns(UserWarning, match="NOT private"):
            return keras_dp.DPSGD(1.0, l2_norm_clip=1, noise_multiplier=1, batch_size=8, seed=1)

    models = [running.compiled(n, make_optimizer) for n in (2, 0)]
    for model in models:
        running.fit_unevenly(model, epochs=1)
    running.assert_same(*models)


def test_every_random_state_agrees():
    """Weights, optimizer and noise after several updates of Adam, each copy of each."""
    model = running.compiled(
        2, lambda: keras_dp.DPAdam(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)
    )
    running.fit_unevenly(model)
    running.assert_copies_agree(model)
    local = model.distribute_strategy.experimental_local_results
    for variable in (model.optimizer._noise._secret, model.optimizer._noise._drawn):
        copies = local(variable)
        assert len(copies) == 2
        for copy in copies:
            np.testing.assert_array_equal(copy.numpy(), copies[0].numpy())


@pytest.fixture(scope="module")
def sgd_of_rate_one():
    return running.compiled(
        4, lambda: keras_dp.DPSGD(1.0, l2_norm_clip=CLIP, noise_multiplier=0, batch_size=8)
    )


@pytest.mark.parametrize("row", [0, 7], ids=["first replica", "last replica"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e4])
def test_pair(sgd_of_rate_one, value, row):
    """PAIR: an example that goes wrong on one replica bounds the update, and spoils no other."""
    model = sgd_of_rate_one
    start = model.get_weights()
    x, y = zoo.batch(model, size=8)
    corrupted = np.copy(x)
    corrupted[row] = value
    ones, huge = np.ones(8, "float32"), np.ones(8, "float32")
    without = np.where(np.arange(8) == row, np.float32(-0.0), ones)
    huge[row] = 1e6

    def update(x, weight):
        model.set_weights(start)
        model.train_on_batch(x, y, weight)
        running.assert_copies_agree(model)
        moved = np.concatenate([np.ravel(a - b) for a, b in zip(model.get_weights(), start)])
        assert np.all(np.isfinite(moved))
        return moved

    try:
        full, less, bad = update(x, ones), update(x, without), update(corrupted, ones)
        one = (CLIP + 1e-3) / 8
        assert np.linalg.norm(full - less) <= one
        assert np.linalg.norm(bad - less) <= one
        assert np.linalg.norm(bad - full) <= 2 * one
        assert np.linalg.norm(update(x, huge) - less) <= one
        if not np.isfinite(value):
            np.testing.assert_allclose(bad, less, atol=1e-6)
    finally:
        model.set_weights(start)


def test_the_same_batch_for_all_replicas_is_refused():
    """It would count each example once for each replica, with noise for one."""
    model = running.compiled(
        2, lambda: keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)
    )
    x, y = zoo.batch(model, size=8)
    start = model.get_weights()

    def step(x, y):
        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer)
        model.optimizer.apply_gradients(clipped)

    tensors = tf.constant(x), tf.constant(y)
    for run in (
        lambda: model.distribute_strategy.run(step, tensors),
        lambda: tf.function(lambda: model.distribute_strategy.run(step, tensors))(),
        lambda: tf.function(lambda: model.distribute_strategy.run(step, (x, y)))(),
    ):
        with pytest.raises(keras_dp.PrivacyError, match="All 2 replicas were given the same batch"):
            run()
    for a, b in zip(model.get_weights(), start):
        np.testing.assert_array_equal(a, b)
