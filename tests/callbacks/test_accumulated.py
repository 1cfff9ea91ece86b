"""What updates of several batches cost: they may hold an example of each of two passes."""

import keras
import numpy as np
import pytest

import keras_dp
from keras_dp.accounting import Phase, epsilon_of_phases
from keras_dp.callbacks import EpsilonLogger, PrivacyBudget
from keras_dp.errors import PrivacyError
from tests.callbacks.runs import BATCH, DELTA, X, Y

UPDATE = 2 * BATCH


def compiled():
    optimizer = keras_dp.DPSGD(
        0.1,
        l2_norm_clip=1.0,
        noise_multiplier=2.0,
        batch_size=UPDATE,
        gradient_accumulation_steps=2,
    )
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer, loss="mse")
    return model


def told(rows, cls=EpsilonLogger, **kwargs):
    return cls(num_examples=rows, sampling="shuffle", delta=DELTA, verbose=0, **kwargs)


def fit(model, rows, *callbacks, **kwargs):
    settings = {"batch_size": BATCH, "callbacks": list(callbacks), "verbose": 0} | kwargs
    return model.fit(X[:rows], Y[:rows], **settings).history.get("epsilon")


def cost(rows, steps, passes, times):
    phase = Phase(
        num_examples=rows,
        batch_size=UPDATE,
        noise_multiplier=2.0,
        sampling="shuffle",
        steps=steps,
        epochs_begun=passes,
        participations_per_update=times,
    )
    return pytest.approx(epsilon_of_phases([phase], DELTA), rel=1e-9)


def test_updates_within_one_pass():
    """4 batches, 2 updates an epoch: nothing is left over."""
    logger = told(32)
    assert fit(compiled(), 32, logger, epochs=3) == [cost(32, 2 * e, e, 1) for e in (1, 2, 3)]
    assert logger.steps == 6


def test_updates_that_span_two_passes():
    """5 batches: the last of an epoch waits for the first of the next."""
    logger = told(40)
    epsilons = fit(compiled(), 40, logger, epochs=4)
    assert epsilons == [cost(40, s, e, 2) for s, e in ((2, 1), (5, 2), (7, 3), (10, 4))]
    assert logger.steps == 10


def test_a_pass_without_an_update_counts_when_its_batch_is_used():
    """An example of the batch that waits, and the same one in the pass after."""
    model, logger = compiled(), told(40)
    data = [(X[:BATCH], Y[:BATCH])]
    for _ in range(2):
        model.fit(generator(data), steps_per_epoch=1, callbacks=[logger], verbose=0)
    assert logger.steps == 1 and logger.epsilon == cost(40, 1, 2, 2)
    assert logger.epsilon > epsilon_of_phases(
        [
            Phase(
                num_examples=40,
                batch_size=UPDATE,
                noise_multiplier=2.0,
                sampling="shuffle",
                steps=1,
            )
        ],
        DELTA,
    )


def generator(data):
    yield from data


def test_an_epoch_that_was_cut_short_leaves_a_batch_over():
    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 0

    model, logger = compiled(), told(32)
    fit(model, 32, logger, Stops())
    assert logger.steps == 0 and logger.epsilon == 0.0
    fit(model, 32, logger)
    two_passes_in_one_update = logger.epsilon
    (phase,) = logger.ledger.phases
    assert (phase.steps, phase.participations_per_update) == (2, 2)
    assert two_passes_in_one_update >= cost(32, 2, 1, 2).expected


def test_an_optimizer_that_was_used_before_may_have_a_batch_left():
    model = compiled()
    fit(model, 32)
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    logger = told(32)
    fit(model, 32, logger)
    assert {p.participations_per_update for p in logger.ledger.phases} == {2}


@pytest.mark.parametrize("rows", [32, 40])
def test_a_budget_with_a_logger_beside_it(rows):
    model, most = compiled(), 4.0
    logger = told(rows)
    guard = told(rows, PrivacyBudget, max_epsilon=most, ledger=logger.ledger)
    fit(model, rows, logger, guard, epochs=100)
    made = int(model.optimizer.iterations)
    assert 0 < made == logger.steps and logger.epsilon <= most
    assert guard.updates_left() == 0


def test_batches_and_updates_have_to_fit():
    with pytest.raises(PrivacyError, match="batch_size is 16, 2 of them in an update, .* is 16"):
        fit(compiled(), 32, told(32), batch_size=UPDATE)
    assert np.isfinite(fit(compiled(), 32, told(32))).all()
