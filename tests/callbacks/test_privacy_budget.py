"""PrivacyBudget in real `fit` runs: never more than allowed, and no update less than fits."""

import math
import warnings
import weakref

import keras
import numpy as np
import pytest

import keras_dp
from keras_dp.accounting import Phase, ledger
from keras_dp.callbacks import EpsilonLogger, PrivacyBudget
from keras_dp.errors import BudgetExceededError, PrivacyError
from tests.callbacks.runs import BATCH, DELTA, N, X, Y, compiled, poisson, sampler, sgd, shuffled

MOST = 27  # updates of the default optimizer whose epsilon is at most 2
assert poisson(MOST) <= 2.0 < poisson(MOST + 1)


def budget(batches, max_epsilon=2.0, **kwargs):
    return PrivacyBudget(batches, delta=DELTA, max_epsilon=max_epsilon, **({"verbose": 0} | kwargs))


def made(model):
    return int(model.optimizer.iterations)


class Watch(keras.callbacks.Callback):
    """Sees after every execution how many updates were made, and what they cost."""

    def on_train_begin(self, logs=None):
        self.made = [made(self.model)]

    def on_train_batch_end(self, batch, logs=None):
        self.made.append(made(self.model))


@pytest.mark.parametrize("steps_per_execution, per_epoch", [(1, 5), (2, 9), (3, 5), (50, 9)])
def test_it_stops_before_the_update_that_would_exceed(steps_per_execution, per_epoch):
    batches = sampler(steps_per_epoch=per_epoch)
    model = compiled(steps_per_execution=steps_per_execution)
    guard, watch = budget(batches), Watch()
    model.fit(batches, epochs=1000, callbacks=[guard, watch], verbose=0)
    left = per_epoch - made(model) % per_epoch
    assert made(model) <= MOST < made(model) + min(steps_per_execution, left)
    assert guard.epsilon == pytest.approx(poisson(made(model)), rel=1e-9) and guard.epsilon <= 2.0
    assert guard.steps == made(model) == watch.made[-1]
    assert guard.updates_left() == MOST - made(model)
    assert model.stop_training


@pytest.mark.parametrize("limits", [(2.0, 4.0), (4.0, 2.0)])
def test_the_tightest_of_several_budgets_on_a_ledger_counts(limits):
    batches, model = sampler(), compiled()
    book = keras_dp.PrivacyLedger(num_examples=N)
    budgets = [budget(batches, limit, ledger=book) for limit in limits]
    model.fit(batches, epochs=1000, callbacks=budgets, verbose=0)
    assert made(model) == MOST and book.epsilon(DELTA) <= 2.0


def test_the_model_stays_usable(tmp_path):
    batches, model = sampler(), compiled()
    history = model.fit(batches, epochs=1000, callbacks=[budget(batches)], verbose=0).history
    assert len(history["loss"]) == -(-MOST // 5)
    assert np.isfinite(model.predict(X, verbose=0)).all() and model.evaluate(X, Y, verbose=0) > 0
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_nothing_left_is_refused_before_the_first_update():
    batches, model = sampler(), compiled()
    guard = budget(batches)
    model.fit(batches, epochs=1000, callbacks=[guard], verbose=0)
    before = [w.copy() for w in model.get_weights()]
    match = r"after 27 updates, and max_epsilon is 2: no update is left"
    for _ in range(2):
        with pytest.raises(BudgetExceededError, match=match):
            model.fit(batches, callbacks=[guard], verbose=0)
        with pytest.raises(BudgetExceededError, match=match):
            model.train_on_batch(X[:BATCH], Y[:BATCH])
    np.testing.assert_equal(model.get_weights(), before)
    with pytest.raises(BudgetExceededError, match=match):  # a new callback sees the counter
        model.fit(batches, callbacks=[budget(batches)], verbose=0)


def test_a_budget_for_not_even_one_update():
    batches = sampler()
    with pytest.raises(BudgetExceededError, match="no update is left"):
        compiled().fit(batches, callbacks=[budget(batches, 0.01)], verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = compiled(sgd(noise_multiplier=0.0))
        with pytest.raises(BudgetExceededError, match="no update is left"):
            model.fit(batches, callbacks=[budget(batches, 1e6)], verbose=0)
    assert made(model) == 0


def test_too_many_updates_at_once():
    batches, model = sampler(steps_per_epoch=40), compiled(steps_per_execution=30)
    match = "27 updates are left, but 30 would be made at once. .*smaller steps_per_execution"
    with pytest.raises(BudgetExceededError, match=match):
        model.fit(batches, callbacks=[budget(batches)], verbose=0)
    assert made(model) == 0


def test_train_on_batch_is_held_to_the_same_budget():
    batches, model = sampler(), compiled()
    guard = budget(batches)
    model.fit(batches, epochs=2, callbacks=[guard], verbose=0)
    with pytest.raises(BudgetExceededError):
        for _ in range(1000):
            model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert made(model) == MOST == guard.steps
    model.fit(batches, verbose=0)  # without the callback: nobody asks for a limit
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert made(model) == MOST + 6


def test_the_last_epoch_ends_by_itself(capsys):
    batches, model = sampler(), compiled()
    guard = budget(batches, max_epsilon=poisson(10), verbose=1)
    model.fit(batches, epochs=2, callbacks=[guard], verbose=0)
    assert made(model) == 10 and not model.stop_training and capsys.readouterr().out == ""
    assert guard.updates_left() == 0


@pytest.mark.parametrize("epochs", [1, 2])
def test_it_says_in_one_line_what_it_did(capsys, epochs):
    batches = sampler(steps_per_epoch=MOST + 1 if epochs == 1 else MOST)
    compiled().fit(batches, epochs=epochs, callbacks=[budget(batches, verbose=1)], verbose=0)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("PrivacyBudget: training stopped after 27 updates at epsilon = 1.9")


@pytest.mark.parametrize("steps_per_execution", [1, 3, 5])
def test_a_budget_for_whole_passes_gives_whole_passes(steps_per_execution):
    """The last execution of an epoch has fewer batches: no pass is broken off for it."""
    guard = PrivacyBudget(
        num_examples=N, sampling="shuffle", delta=DELTA, max_epsilon=shuffled(2), verbose=0
    )
    model = compiled(steps_per_execution=steps_per_execution)
    history = model.fit(X, Y, batch_size=BATCH, epochs=9, callbacks=[guard], verbose=0).history
    assert made(model) == 10 and len(history["loss"]) == 2


@pytest.mark.parametrize("repeats", [1, 3])
def test_shuffled_batches_stop_before_the_pass_that_would_exceed(repeats):
    """Also if one epoch of Keras holds several passes."""
    passes = 4
    guard = PrivacyBudget(
        num_examples=N, sampling="shuffle", delta=DELTA, max_epsilon=shuffled(passes), verbose=0
    )
    model = compiled()
    if repeats == 1:
        model.fit(X, Y, batch_size=BATCH, epochs=100, callbacks=[guard], verbose=0)
        assert made(model) == 5 * passes
    else:
        import tensorflow as tf

        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH).repeat()
        model.fit(data, steps_per_epoch=13, epochs=100, callbacks=[guard], verbose=0)
        assert made(model) == 13 + 5  # three passes begun, then one of which nothing may follow
    assert guard.epsilon == pytest.approx(shuffled(passes), rel=1e-9)
    with pytest.raises(BudgetExceededError):
        model.train_on_batch(X[:BATCH], Y[:BATCH])


def test_earlier_trainings_on_the_data_count(tmp_path):
    book = keras_dp.PrivacyLedger(tmp_path, num_examples=N, name="small")
    book.record(Phase(num_examples=N, batch_size=BATCH, noise_multiplier=2.0, steps=20))
    batches, model = sampler(), compiled()
    guard = budget(batches, ledger=book)
    assert guard.updates_left(model.optimizer) == MOST - 20
    model.fit(batches, epochs=100, callbacks=[guard], verbose=0)
    assert made(model) == MOST - 20 and book.epsilon(DELTA) == pytest.approx(poisson(MOST))
    with pytest.raises(BudgetExceededError):
        compiled().fit(batches, callbacks=[budget(batches, ledger=tmp_path)], verbose=0)


@pytest.mark.parametrize("where, order", [("memory", 1), ("file", -1), ("file", 1)])
def test_with_a_logger_on_the_same_ledger(tmp_path, order, where):
    book = keras_dp.PrivacyLedger(tmp_path if where == "file" else None, num_examples=N)
    batches, model = sampler(), compiled(steps_per_execution=2)
    logger = EpsilonLogger(batches, delta=DELTA, ledger=book, every_n_updates=1, verbose=0)
    callbacks = [logger, budget(batches, ledger=book)][::order]
    history = model.fit(batches, epochs=100, callbacks=callbacks, verbose=0).history
    assert MOST - 2 < made(model) <= MOST and book.steps == made(model)
    assert history["epsilon"][-1] == pytest.approx(poisson(made(model)), rel=1e-9)
    assert len(book.entries) == 1


def test_another_process_that_spends_at_the_same_time(tmp_path, monkeypatch):
    """What the other has written is not there to be spent, seen within the second."""
    batches, model = sampler(), compiled()
    guard = budget(batches, ledger=tmp_path)

    class Other(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                monkeypatch.setattr(ledger, "_books", weakref.WeakValueDictionary())
                other = keras_dp.PrivacyLedger(tmp_path)
                other.record(Phase(num_examples=N, batch_size=BATCH, noise_multiplier=2.0, steps=6))

    model.fit(batches, epochs=100, callbacks=[Other(), guard], verbose=0)
    assert made(model) == MOST - 6 and guard.steps == MOST


def test_callbacks_on_one_ledger_must_agree():
    book = keras_dp.PrivacyLedger(num_examples=N)
    guards = [
        PrivacyBudget(num_examples=n, sampling="shuffle", delta=DELTA, max_epsilon=9, ledger=book)
        for n in (N, N - 1)
    ]
    model, data = compiled(), iter(lambda: (X[:BATCH], Y[:BATCH]), None)

    def batches():
        yield from data

    with pytest.raises(PrivacyError, match="told different things about this fit"):
        model.fit(batches(), steps_per_epoch=5, callbacks=guards, verbose=0)


def test_updates_left_tells_before_training():
    batches, model = sampler(), compiled()
    guard = budget(batches)
    with pytest.raises(ValueError, match=r"budget\.updates_left\(model\.optimizer\)"):
        guard.updates_left()
    assert guard.updates_left(model.optimizer) == MOST
    model.fit(batches, epochs=2, callbacks=[guard], verbose=0)
    assert guard.updates_left() == MOST - 10


def test_many_updates_are_found_at_once():
    batches = keras_dp.PoissonSampler(np.zeros((10**5, 1)), batch_size=1)
    optimizer = sgd(noise_multiplier=20.0, batch_size=1)
    left = PrivacyBudget(batches, delta=1e-6, max_epsilon=1.0).updates_left(optimizer)
    epsilon = keras_dp.compute_epsilon(
        num_examples=10**5, batch_size=1, noise_multiplier=20.0, delta=1e-6, steps=left
    )
    more = keras_dp.compute_epsilon(
        num_examples=10**5, batch_size=1, noise_multiplier=20.0, delta=1e-6, steps=left + 1
    )
    assert epsilon <= 1.0 < more and left > 10**6


@pytest.mark.parametrize("bad", [0, -1.0, math.inf, math.nan, "3", None, True])
def test_bad_budgets(bad):
    with pytest.raises(ValueError, match="max_epsilon must be"):
        PrivacyBudget(sampler(), delta=DELTA, max_epsilon=bad)
