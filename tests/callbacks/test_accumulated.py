"""What updates of several batches cost: they may hold an example of each of two passes."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.accounting import Phase, epsilon_of_phases
from keras_dp.callbacks import EpsilonLogger, PrivacyBudget
from keras_dp.errors import PrivacyError
from tests.callbacks.runs import BATCH, DELTA, X, Y

UPDATE = 2 * BATCH


def compiled(parts=2, update=UPDATE):
    optimizer = keras_dp.DPSGD(
        0.1,
        l2_norm_clip=1.0,
        noise_multiplier=2.0,
        batch_size=update,
        gradient_accumulation_steps=parts,
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


def only(logger):
    (phase,) = logger.ledger.phases
    return phase


def ends_after_a_batch(how):
    class Ends(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if how == "interrupt":
                raise KeyboardInterrupt
            self.model.stop_training = True

    return Ends()


@pytest.mark.parametrize("how", ["interrupt", "stop_training", "train_on_batch", "several fits"])
def test_what_an_earlier_training_left_is_in_no_update(how):
    """Else an example would be in one update twice, or four times, and count once."""
    model, logger = compiled(), told(32)
    for _ in range(3 if how == "several fits" else 1):
        if how == "train_on_batch":
            model.train_on_batch(X[:BATCH], Y[:BATCH])
            continue
        try:
            fit(model, 32, logger, ends_after_a_batch(how))
        except KeyboardInterrupt:
            pass
        assert logger.steps == 0 and logger.epsilon == 0.0
    updates, waiting = [], []

    class Watches(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            updates.append(int(model.optimizer.iterations))
            waiting.append(model.optimizer.parts_waiting)

    fit(model, 32, logger, Watches())
    assert (updates, waiting) == ([0, 1, 1, 2], [1, 0, 1, 0])
    assert only(logger).participations_per_update == 1 and only(logger).steps == 2


def test_a_run_that_is_resumed_is_not_cut(tmp_path):
    model = compiled()
    fit(model, 32, told(32), epochs=2)
    model.save(tmp_path / "m.keras")
    again, logger = keras.models.load_model(tmp_path / "m.keras"), told(32)
    assert fit(again, 32, logger) == [cost(32, 6, 3, 1)]


def test_an_epoch_that_ends_early_is_counted_with_the_next():
    """The data set has 3 of the 4 batches that were said: 1 waits for the next epoch."""
    data = tf.data.Dataset.from_tensor_slices((X[:24], Y[:24])).batch(BATCH)
    data = data.apply(tf.data.experimental.assert_cardinality(3))
    model, logger = compiled(), told(32)
    model.fit(data, steps_per_epoch=4, epochs=2, callbacks=[logger], verbose=0)
    phases = {p.participations_per_update: p for p in logger.ledger.phases}
    assert {times: p.steps for times, p in phases.items()} == {1: 1, 2: 2}
    assert phases[2].passes >= 2  # that of the batch which waited, and the next


def stream(rows, batch=BATCH):
    return tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).shuffle(rows).batch(batch)


@pytest.mark.parametrize(
    "rows, steps, times",
    [(40, 10, 2), (40, 4, 2), (32, 4, 1), (32, 8, 1), (32, 6, 2)],
)
def test_steps_per_epoch_are_not_a_pass(rows, steps, times):
    """Passes of 5, or 4, batches follow on each other within an epoch."""
    model, logger = compiled(), told(rows)
    data = stream(rows).repeat()
    model.fit(data, steps_per_epoch=steps, epochs=3, callbacks=[logger], verbose=0)
    phase = only(logger)
    assert phase.participations_per_update == times and phase.steps == 3 * steps // 2
    assert phase.passes >= -(-3 * steps * BATCH // rows)


def test_a_last_batch_that_may_have_been_dropped():
    """36 examples: 5 batches, or 4 and none of 4 examples; either would have to be aligned."""
    model, logger = compiled(), told(36)
    data = stream(36).repeat()
    model.fit(data, steps_per_epoch=20, callbacks=[logger], verbose=0)
    assert only(logger).participations_per_update == 2 and only(logger).passes >= 5


def test_epochs_shorter_than_an_update():
    """Four epochs of one batch each make one update, with an example in it four times."""
    model, logger = compiled(parts=4, update=32), told(32)
    data = stream(32).take(1)
    model.fit(data, epochs=4, callbacks=[logger], verbose=0)
    phase = only(logger)
    assert (phase.steps, phase.participations_per_update, phase.passes) == (1, 4, 4)
    assert phase.releases == 16


def test_train_on_batch_is_of_no_known_pass():
    model, logger = compiled(), told(32)
    fit(model, 32, logger)
    with pytest.raises(PrivacyError, match="train_on_batch with gradient_accumulation_steps=2"):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert logger.steps == 2 and model.optimizer.parts_waiting == 0


def full_batch():
    return EpsilonLogger(num_examples=16, sampling="full_batch", delta=DELTA, verbose=0)


def test_updates_of_the_full_batch():
    model, logger = compiled(), full_batch()
    fit(model, 16, logger, ends_after_a_batch("stop_training"))
    fit(model, 16, logger, epochs=3)
    assert logger.steps == 3 and only(logger).sampling == "full_batch"
    data = stream(16).repeat()
    model.fit(data, steps_per_epoch=4, callbacks=[logger], verbose=0)
    assert logger.steps == 5


@pytest.mark.parametrize("steps", [3, None])
def test_updates_that_are_not_the_full_batch(steps):
    model, logger = compiled(), full_batch()
    data = stream(16).repeat() if steps else stream(8)
    with pytest.raises(PrivacyError, match="batches in a row to be the whole data set"):
        model.fit(data, steps_per_epoch=steps, epochs=2, callbacks=[logger], verbose=0)
    assert logger.steps == 0


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
