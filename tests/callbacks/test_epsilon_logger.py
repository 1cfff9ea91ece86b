"""EpsilonLogger in real `fit` runs."""

import csv
import glob
import math
import os
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp import accounting, renyi
from keras_dp.accounting import (
    Phase,
    compute_epsilon,
    compute_noise_multiplier,
    epsilon_of_phases,
)
from keras_dp.callbacks import EpsilonLogger
from keras_dp.errors import PrivacyError
from tests.callbacks.runs import (
    BATCH,
    DELTA,
    N,
    X,
    Y,
    compiled,
    poisson,
    sampler,
    sgd,
    shuffle_logger,
    shuffled,
)


def test_epsilon_of_every_epoch_reaches_the_history():
    model, batches = compiled(), sampler()
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    assert (logger.steps, logger.epsilon) == (0, 0.0)
    history = model.fit(
        batches, epochs=3, callbacks=[logger], validation_data=(X, Y), verbose=0
    ).history
    assert history["epsilon"] == pytest.approx([poisson(5), poisson(10), poisson(15)], rel=1e-9)
    assert all(type(epsilon) is float for epsilon in history["epsilon"])
    assert set(history) == {"loss", "val_loss", "epsilon"}
    assert logger.steps == int(model.optimizer.iterations) == 15
    assert logger.epsilon == history["epsilon"][-1]


def test_epsilon_reaches_progress_bar_csv_and_tensorboard(tmp_path, capsys):
    model, batches = compiled(), sampler()
    csv_file, board = tmp_path / "log.csv", tmp_path / "board"
    callbacks = [
        EpsilonLogger(batches, delta=DELTA, verbose=0),
        keras.callbacks.CSVLogger(csv_file),
        keras.callbacks.TensorBoard(board, write_graph=False),
    ]
    model.fit(batches, epochs=2, callbacks=callbacks, verbose=2)
    expected = [poisson(5), poisson(10)]
    printed = capsys.readouterr().out
    assert all(f"epsilon: {epsilon:.4f}" in printed for epsilon in expected)
    with open(csv_file) as file:
        rows = [float(row["epsilon"]) for row in csv.DictReader(file)]
    assert rows == pytest.approx(expected, rel=1e-9)
    assert scalars(board / "train", "epoch_epsilon") == pytest.approx(expected, rel=1e-6)


def scalars(directory, tag):
    found = []
    for path in glob.glob(os.path.join(directory, "events.*")):
        for record in tf.data.TFRecordDataset(path):
            event = tf.compat.v1.Event.FromString(record.numpy())
            found += [float(tf.make_ndarray(v.tensor)) for v in event.summary.value if v.tag == tag]
    return found


def test_steps_are_the_optimizers_own():
    """Several fits, train_on_batch between them, several steps in one call of Keras."""
    model, batches = compiled(steps_per_execution=4), sampler()
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    first = model.fit(batches, epochs=1, callbacks=[logger], verbose=0).history["epsilon"]
    assert first == pytest.approx([poisson(5)], rel=1e-9) and logger.steps == 5
    for _ in range(3):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert logger.steps == 8 and logger.epsilon == pytest.approx(poisson(8), rel=1e-9)
    second = model.fit(batches, epochs=2, callbacks=[logger], verbose=0).history["epsilon"]
    assert second == pytest.approx([poisson(13), poisson(18)], rel=1e-9)


def test_a_logger_that_comes_late_counts_from_the_first_update():
    model, batches = compiled(), sampler()
    model.fit(batches, epochs=1, verbose=0)
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    history = model.fit(batches, epochs=1, callbacks=[logger], verbose=0).history
    assert history["epsilon"] == pytest.approx([poisson(10)], rel=1e-9)


def test_calibrated_for_some_epochs_the_run_ends_within_the_target():
    """Steps per epoch are rounded the same way in both places (FAILURES row 17)."""
    settings = {"num_examples": N - 1, "batch_size": BATCH, "delta": DELTA}
    sigma = compute_noise_multiplier(target_epsilon=2.0, epochs=3, **settings)
    model = compiled(sgd(sigma))
    batches = keras_dp.PoissonSampler(X[1:], Y[1:], batch_size=BATCH)
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    history = model.fit(batches, epochs=3, callbacks=[logger], verbose=0).history
    assert 1.999 < history["epsilon"][-1] <= 2.0


def test_loss_scaled_model():
    """Keras wraps the optimizer of a float16 model; the DP optimizer inside is found."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype="mixed_float16")])
    model.compile(optimizer=keras.optimizers.LossScaleOptimizer(sgd()), loss="mse")
    logger = EpsilonLogger(sampler(), delta=DELTA, verbose=0)
    logger.set_model(model)
    logger.on_train_begin()
    logger.on_epoch_begin(0)
    model.optimizer.inner_optimizer.iterations.assign(5)
    assert logger.epsilon == pytest.approx(poisson(5), rel=1e-9)


def test_guarantee_is_printed_once_at_the_end(capsys):
    batches = sampler()
    compiled().fit(batches, epochs=2, callbacks=[EpsilonLogger(batches, delta=DELTA)], verbose=0)
    printed = capsys.readouterr().out
    settings = {"num_examples": N, "batch_size": BATCH, "noise_multiplier": 2.0, "delta": DELTA}
    assert printed == accounting.privacy_statement(steps=10, **settings) + "\n"
    assert "10 updates" in printed and "Not covered: the loss, metrics" in printed


def test_nothing_is_printed_if_so_asked(capsys):
    compiled().fit(X, Y, batch_size=BATCH, callbacks=[shuffle_logger()], verbose=0)
    assert capsys.readouterr().out == ""


def test_divergences_are_found_once_for_a_fit():
    renyi.divergences.cache_clear()
    batches = sampler()
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    compiled().fit(batches, epochs=4, callbacks=[logger], verbose=0)
    assert renyi.divergences.cache_info().misses == 1


def test_shuffled_batches_count_epochs():
    logger = shuffle_logger()
    history = (
        compiled().fit(X, Y, batch_size=BATCH, epochs=2, callbacks=[logger], verbose=0).history
    )
    assert history["epsilon"] == pytest.approx([shuffled(1), shuffled(2)], rel=1e-9)


def test_shuffled_epochs_that_were_cut_short_count_in_full():
    """Each fit shuffles anew: an example may be in the only batch of both."""
    model, logger = compiled(), shuffle_logger()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).batch(BATCH)
    for _ in range(2):
        model.fit(data.take(1), callbacks=[logger], verbose=0)
    assert logger.steps == 2 and logger.epsilon == pytest.approx(shuffled(2), rel=1e-9)
    model.fit(data.repeat(), steps_per_epoch=6, callbacks=[logger], verbose=0)
    assert logger.steps == 8 and logger.epsilon == pytest.approx(shuffled(4), rel=1e-9)
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    for _ in range(3):  # looking changes nothing
        assert logger.epsilon == pytest.approx(shuffled(5), rel=1e-9)
    model.fit(data.take(1), callbacks=[logger], verbose=0)
    assert logger.epsilon == pytest.approx(shuffled(6), rel=1e-9)


def test_full_batches():
    logger = EpsilonLogger(num_examples=N, sampling="full_batch", delta=DELTA, verbose=0)
    model = compiled(sgd(20.0, batch_size=N))
    history = model.fit(X, Y, batch_size=N, epochs=3, callbacks=[logger], verbose=0).history
    settings = {"num_examples": N, "batch_size": N, "noise_multiplier": 20.0, "delta": DELTA}
    expected = [compute_epsilon(steps=t, sampling="full_batch", **settings) for t in (1, 2, 3)]
    assert history["epsilon"] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match=f"batch_size={BATCH} and num_examples={N}"):
        compiled().fit(X, Y, batch_size=BATCH, callbacks=[logger], verbose=0)


def test_resumed_run_spends_as_much_as_an_unbroken_one(tmp_path):
    """Keras restores the optimizer when training begins, after this callback was called."""
    batches = sampler()

    def fit(epochs, callbacks=()):
        model = compiled()
        logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
        restore = keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        return model.fit(
            batches, epochs=epochs, callbacks=[logger, restore, *callbacks], verbose=0
        ).history["epsilon"]

    assert fit(epochs=2) == pytest.approx([poisson(5), poisson(10)], rel=1e-9)
    assert fit(epochs=3) == pytest.approx([poisson(15)], rel=1e-9)


def test_no_noise_is_infinite_and_loud(capsys):
    batches = sampler()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = compiled(sgd(noise_multiplier=0.0))
    with pytest.warns(UserWarning, match="NOT PRIVATE"):
        history = model.fit(
            batches, epochs=1, callbacks=[EpsilonLogger(batches, delta=DELTA)], verbose=0
        ).history
    assert history["epsilon"] == [math.inf]
    assert capsys.readouterr().out.startswith("NOT PRIVATE")


def test_optimizer_without_privacy_is_refused():
    model = compiled(keras.optimizers.SGD(0.1))
    before = [w.copy() for w in model.get_weights()]
    with pytest.raises(PrivacyError, match="DP optimizer; received SGD"):
        model.fit(X, Y, callbacks=[shuffle_logger()], verbose=0)
    np.testing.assert_equal(model.get_weights(), before)


def test_updates_before_the_fit_need_no_batches_of_it():
    batches, model = sampler(), compiled()
    for _ in range(30):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    model.fit(batches, callbacks=[logger], verbose=0)
    assert logger.steps == 35


@pytest.mark.parametrize("kind", ["threads", "dataset"])
def test_every_way_to_read_a_sampler_is_accepted(kind):
    batches = sampler(workers=2) if kind == "threads" else sampler()
    data = batches.as_tf_dataset() if kind == "dataset" else batches
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    history = compiled().fit(data, epochs=2, callbacks=[logger], verbose=0).history
    assert history["epsilon"] == pytest.approx([poisson(5), poisson(10)], rel=1e-9)


def test_optimizers_in_turn_add_up():
    """A head first, then all of it with less noise: both were computed from the data."""
    batches, model = sampler(), compiled()
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    model.fit(batches, callbacks=[logger], verbose=0)
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    model.compile(optimizer=sgd(noise_multiplier=3.0), loss="mse")
    history = model.fit(batches, epochs=2, callbacks=[logger], verbose=0).history["epsilon"]
    phase = {"num_examples": N, "batch_size": BATCH}
    head = Phase(noise_multiplier=2.0, steps=6, **phase)
    expected = [
        epsilon_of_phases([head, Phase(noise_multiplier=3.0, steps=t, **phase)], DELTA)
        for t in (5, 10)
    ]
    assert history == pytest.approx(expected, rel=1e-9) and logger.steps == 16
    assert poisson(16, noise_multiplier=3.0) < history[-1] < poisson(16, noise_multiplier=2.0)


def test_a_counter_that_went_back_gives_nothing_back():
    model, logger = compiled(), shuffle_logger()
    model.fit(X, Y, batch_size=BATCH, callbacks=[logger], verbose=0)
    model.optimizer.iterations.assign(2)
    assert (logger.steps, logger.epsilon) == (5, pytest.approx(shuffled(1), rel=1e-9))
    model.fit(X, Y, batch_size=BATCH, callbacks=[logger], verbose=0)
    assert (logger.steps, logger.epsilon) == (10, pytest.approx(shuffled(2), rel=1e-9))


def test_another_model_on_the_same_data_adds_up():
    logger = shuffle_logger()
    for models in (1, 2):
        compiled().fit(X, Y, batch_size=BATCH, callbacks=[logger], verbose=0)
        assert logger.steps == 5 * models
        assert logger.epsilon == pytest.approx(shuffled(models), rel=1e-9)
    assert shuffle_logger().steps == 0  # a new one knows of neither


def test_an_epoch_that_an_error_ended_is_a_pass_of_its_own():
    model, logger = compiled(), shuffle_logger()

    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                raise KeyboardInterrupt

    for fits in (1, 2):
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, Y, batch_size=BATCH, callbacks=[logger, Fails()], verbose=0)
        assert logger.steps == 2 * fits
        assert logger.epsilon == pytest.approx(shuffled(fits), rel=1e-9)


@pytest.mark.parametrize("steps_per_execution", [1, 2, 3])
def test_epsilon_within_epochs(steps_per_execution, tmp_path):
    """Every so many updates of the optimizer's own counter, whatever one call of a hook holds."""

    class Seen(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.epsilons = []

        def on_train_batch_end(self, batch, logs=None):
            self.epsilons.append((int(self.model.optimizer.iterations), logs.get("epsilon")))

    model, batches = compiled(steps_per_execution=steps_per_execution), sampler(steps_per_epoch=7)
    seen, board = Seen(), keras.callbacks.TensorBoard(tmp_path, update_freq=1, write_graph=False)
    logger = EpsilonLogger(batches, delta=DELTA, every_n_updates=3, verbose=0)
    model.fit(batches, callbacks=[logger, seen, board], verbose=0)
    expected, shown, shown_at = [], None, 0
    for made, _ in seen.epsilons:
        if made // 3 > shown_at // 3:
            shown, shown_at = pytest.approx(poisson(made), rel=1e-9), made
        expected.append(shown)
    assert [epsilon for _, epsilon in seen.epsilons] == expected
    assert expected[-1] is not None
    written = scalars(tmp_path / "train", "batch_epsilon")
    assert written[-1] == pytest.approx(seen.epsilons[-1][1], rel=1e-6)


def test_initial_epoch_is_no_count_of_updates():
    batches = sampler()
    logger = EpsilonLogger(batches, delta=DELTA, verbose=0)
    history = (
        compiled()
        .fit(batches, initial_epoch=3, epochs=5, callbacks=[logger], verbose=0)
        .history["epsilon"]
    )
    assert history == pytest.approx([poisson(5), poisson(10)], rel=1e-9)


def test_updates_of_unknown_origin_are_counted_and_named(capsys):
    batches, model = sampler(), compiled()
    model.fit(batches, verbose=0)
    model.fit(batches, callbacks=[EpsilonLogger(batches, delta=DELTA)], epochs=2, verbose=0)
    printed = capsys.readouterr().out
    assert printed.count("has made 5 updates before, which are counted") == 1
    assert "15 updates" in printed


@pytest.mark.parametrize("arguments", [{}, {"num_examples": N}, {"sampling": "shuffle"}])
def test_source_of_batches_is_needed(arguments):
    with pytest.raises(ValueError, match=r"(?s)PoissonSampler.*\"shuffle\".*\"poisson\""):
        EpsilonLogger(delta=DELTA, **arguments)


@pytest.mark.parametrize("arguments", [{"num_examples": N}, {"sampling": "poisson"}])
def test_source_of_batches_is_said_once(arguments):
    with pytest.raises(ValueError, match="sampler and also"):
        EpsilonLogger(sampler(), delta=DELTA, **arguments)


def test_something_else_than_a_sampler():
    with pytest.raises(ValueError, match="received int, without num_examples"):
        EpsilonLogger(N, delta=DELTA)


@pytest.mark.parametrize(
    "name, value",
    [
        ("num_examples", 0),
        ("num_examples", 40.0),
        ("sampling", "Poisson"),
        ("delta", 0),
        ("delta", 2),
    ],
)
def test_bad_settings_fail_before_training(name, value):
    settings = {"num_examples": N, "sampling": "shuffle", "delta": DELTA, name: value}
    with pytest.raises(ValueError, match=f"{name} must be .*received {value!r}"):
        EpsilonLogger(**settings)
