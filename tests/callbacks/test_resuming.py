"""The ledger over crashes, checkpoints and processes: nothing lost, nothing counted twice."""

import gc
import json
import os
import pathlib
import signal
import subprocess
import sys
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.accounting import ledger
from keras_dp.callbacks import EpsilonLogger
from keras_dp.errors import LedgerError
from tests.callbacks.runs import BATCH, DELTA, N, X, Y, compiled, poisson, sampler, sgd, shuffled

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(name="new_process")
def _new_process(monkeypatch):
    """From here on, ledgers know nothing but what is on disk."""
    return lambda: monkeypatch.setattr(ledger, "_books", weakref.WeakValueDictionary())


def logger(path, **kwargs):
    return EpsilonLogger(sampler(), delta=DELTA, ledger=path, **({"verbose": 0} | kwargs))


def train(model, logger, epochs, *callbacks, **kwargs):
    batches = logger._source.sampler
    history = model.fit(batches, epochs=epochs, callbacks=[logger, *callbacks], verbose=0, **kwargs)
    return history.history["epsilon"]


def on_file(path):
    """Updates that a reader of the file finds, by hand."""
    return sum(entry["phase"]["steps"] for entry in json.loads(path.read_text())["entries"])


class Reader(keras.callbacks.Callback):
    """Compares file and counter whenever weights may get out."""

    def __init__(self, path, at_once):
        super().__init__()
        self.path, self.at_once, self.compared = path, at_once, 0

    def compare(self, more):
        made = int(self.model.optimizer.iterations)
        assert on_file(self.path) >= made + more, (on_file(self.path), made)
        self.compared += 1

    def on_train_batch_begin(self, batch, logs=None):
        self.compare(min(self.at_once, 5 - batch))

    def on_train_batch_end(self, batch, logs=None):
        self.compare(0)

    def on_epoch_end(self, epoch, logs=None):
        assert on_file(self.path) == int(self.model.optimizer.iterations)


@pytest.mark.parametrize("steps_per_execution, first", [(1, True), (3, False), (100, True)])
def test_updates_are_on_file_before_they_are_made(tmp_path, steps_per_execution, first):
    path = tmp_path / "ledger.json"
    model, reader = (
        compiled(steps_per_execution=steps_per_execution),
        Reader(path, steps_per_execution),
    )
    batches = sampler()
    log = EpsilonLogger(batches, delta=DELTA, ledger=path, verbose=0)
    callbacks = [reader, log] if not first else [log, reader]
    if not first:  # then the reader sees an epoch's end before the ledger is settled
        reader.on_epoch_end = lambda *_: None
    model.fit(batches, epochs=4, callbacks=callbacks, verbose=0)
    assert reader.compared >= 8 and on_file(path) == 20
    for _ in range(3):
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        assert on_file(path) >= int(model.optimizer.iterations)
    assert log.steps == 23


def test_a_loop_that_makes_more_batches_than_it_said(tmp_path):
    """Hooks called by hand, as a model with a fit of its own would."""
    path, model = tmp_path / "ledger.json", compiled()
    log = logger(path)
    log.set_model(model)
    log.set_params({"steps": 2})
    log.on_train_begin()
    log.on_epoch_begin(0)
    for batch in range(6):
        log.on_train_batch_begin(batch)
        assert on_file(path) > int(model.optimizer.iterations)
        model.optimizer.iterations.assign_add(1)
        log.on_train_batch_end(batch)


def full(*_):
    raise OSError("disk full")


def test_a_ledger_that_cannot_be_written_keeps_updates_from_being_made(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    model, log = compiled(), logger(path)
    train(model, log, 1)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(LedgerError, match="disk full"):
            train(model, log, 1)
        with pytest.raises(LedgerError, match="disk full"):
            model.train_on_batch(X[:BATCH], Y[:BATCH])
    assert int(model.optimizer.iterations) == 5
    train(model, log, 2)
    assert on_file(path) == log.steps == 15


def test_a_disk_that_is_full_in_the_middle_of_an_epoch(tmp_path, monkeypatch):
    path = tmp_path / "ledger.json"
    model, log = compiled(), logger(path)

    class Fills(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 1:
                monkeypatch.setattr(
                    os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full"))
                )

    with pytest.raises(LedgerError, match="full"):
        train(model, log, 50, Fills())
    made = int(model.optimizer.iterations)
    assert made <= on_file(path)
    monkeypatch.undo()
    train(model, log, 1)
    assert on_file(path) == log.steps == made + 5


def test_a_new_process_starts_from_what_was_spent(tmp_path, new_process):
    """With a checkpoint: the same as an unbroken run."""
    epsilons = []
    for epochs in (2, 3):
        new_process()
        restore = keras.callbacks.BackupAndRestore(tmp_path / "back", delete_checkpoint=False)
        model = compiled()
        epsilons += train(model, logger(tmp_path / "l.json"), epochs, restore)
    assert epsilons == pytest.approx([poisson(5), poisson(10), poisson(15)], rel=1e-9)
    assert len(logger(tmp_path / "l.json").ledger.entries) == 2


def test_fresh_weights_on_the_same_data(tmp_path, new_process):
    for runs in (1, 2, 3):
        new_process()
        epsilons = train(compiled(), logger(tmp_path / "l.json"), 1)
        assert epsilons == pytest.approx([poisson(5 * runs)], rel=1e-9)


def test_weights_without_their_optimizer(tmp_path, new_process):
    model = compiled()
    train(model, logger(tmp_path), 2)
    new_process()
    again = compiled()
    again.set_weights(model.get_weights())
    assert train(again, logger(tmp_path), 1) == pytest.approx([poisson(15)], rel=1e-9)


@pytest.mark.parametrize("way", ["load_model", "load_weights", "tf.train.Checkpoint"])
def test_a_checkpoint_of_any_kind(tmp_path, new_process, way):
    model = compiled()
    train(model, logger(tmp_path), 2)
    path = str(tmp_path / "saved")
    model.save(path + ".keras")
    model.save_weights(path + ".weights.h5")
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(path)
    new_process()
    again = compiled()
    if way == "load_model":
        again = keras.models.load_model(path + ".keras")
    else:
        again.optimizer.build(again.trainable_variables)
        if way == "load_weights":
            again.load_weights(path + ".weights.h5")
        else:
            tf.train.Checkpoint(model=again, optimizer=again.optimizer).restore(saved)
    assert train(again, logger(tmp_path), 1) == pytest.approx([poisson(15)], rel=1e-9)


def test_two_that_go_on_from_one_checkpoint_both_count(tmp_path, new_process, capsys):
    model = compiled()
    train(model, logger(tmp_path), 1)
    model.save(tmp_path / "m.keras")
    for runs, more in ((2, 0), (3, 5)):
        new_process()
        again = keras.models.load_model(tmp_path / "m.keras")
        epsilons = train(again, logger(tmp_path, verbose=1), 1)
        assert epsilons == pytest.approx([poisson(5 * runs)], rel=1e-9)
        said = f"at update 5, but the ledger has {more} more of it"
        assert (said in capsys.readouterr().out) == bool(more)


def test_an_older_checkpoint_in_the_same_process(tmp_path):
    """What was done after it stays spent; of one fit and of several, in memory and on disk."""
    for path in (None, tmp_path / "l.json"):
        model, log = compiled(), logger(path)
        train(model, log, 1)
        model.save_weights(tmp_path / "w.weights.h5")
        train(model, log, 1)
        model.load_weights(tmp_path / "w.weights.h5")
        assert int(model.optimizer.iterations) == 5 and log.steps == 10
        assert train(model, log, 1) == pytest.approx([poisson(15)], rel=1e-9)


def test_updates_from_an_older_checkpoint_on_that_no_callback_saw(tmp_path):
    """They bear numbers that the ledger has already, of other updates."""
    model, log = compiled(), logger(tmp_path)
    train(model, log, 1)
    model.save_weights(tmp_path / "w.weights.h5")
    train(model, log, 1)
    model.fit(sampler(steps_per_epoch=2), verbose=0)
    model.load_weights(tmp_path / "w.weights.h5")
    model.fit(sampler(steps_per_epoch=9), verbose=0)
    assert train(model, log, 1) == pytest.approx([poisson(10 + 2 + 9 + 5)], rel=1e-9)


@pytest.mark.parametrize("extra", [False, True])
def test_a_checkpoint_that_is_restored_within_an_epoch(tmp_path, extra):
    """The counter goes back, and on, between two looks at it: what was made stays counted."""

    class Restores(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 7:
                checkpoint.restore(path)

    model, log = compiled(), logger(tmp_path)
    train(model, log, 1)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(str(tmp_path / "c"))
    batches = sampler(steps_per_epoch=20)
    own = EpsilonLogger(batches, delta=DELTA, verbose=0, ledger=log.ledger)
    model.fit(batches, callbacks=[own, Restores()], verbose=0)
    assert int(model.optimizer.iterations) == 5 + 13
    if extra:  # and once more, seen by nobody
        checkpoint.restore(path)
        model.fit(sampler(steps_per_epoch=3), verbose=0)
    assert own.steps >= 5 + 20 + 3 * extra
    train(model, log, 1)
    assert log.steps >= 5 + 20 + 3 * extra + 5


def test_the_same_in_a_new_process(tmp_path, new_process):
    model = compiled()
    train(model, logger(tmp_path), 1)
    model.save(tmp_path / "m.keras")
    train(model, logger(tmp_path), 1)
    new_process()
    again = keras.models.load_model(tmp_path / "m.keras")
    again.fit(sampler(steps_per_epoch=3), verbose=0)
    assert train(again, logger(tmp_path), 1) == pytest.approx([poisson(10 + 3 + 5)], rel=1e-9)


def test_a_checkpoint_of_updates_that_no_ledger_has(tmp_path, new_process):
    """They are counted once, as made on this data, also by those that go on later."""
    model = compiled()
    model.fit(sampler(), epochs=2, verbose=0)
    model.save(tmp_path / "m.keras")
    assert train(model, logger(tmp_path), 1) == pytest.approx([poisson(15)], rel=1e-9)
    new_process()
    again = keras.models.load_model(tmp_path / "m.keras")
    assert train(again, logger(tmp_path), 1) == pytest.approx([poisson(20)], rel=1e-9)


def test_another_run_of_equal_settings_does_not_pass_for_it(tmp_path, new_process):
    """A ledger with as many updates, of other weights on the same data, covers nothing."""
    train(compiled(), logger(tmp_path), 2)
    new_process()
    unlisted = compiled()
    unlisted.fit(sampler(), epochs=2, verbose=0)
    assert train(unlisted, logger(tmp_path), 1) == pytest.approx([poisson(25)], rel=1e-9)


def test_going_on_with_other_noise(tmp_path, new_process):
    """What was done before keeps its own noise."""
    model = compiled()
    train(model, logger(tmp_path), 2)
    model.save_weights(tmp_path / "w.weights.h5")
    new_process()
    again = compiled(sgd(noise_multiplier=4.0))
    again.optimizer.build(again.trainable_variables)
    again.load_weights(tmp_path / "w.weights.h5")
    log = logger(tmp_path)
    epsilon = train(again, log, 1)[-1]
    assert [(p.noise_multiplier, p.steps) for p in log.ledger.phases] == [(2.0, 10), (4.0, 5)]
    assert poisson(10) < epsilon < poisson(15)


def test_shuffled_passes_over_processes(tmp_path, new_process):
    def shuffle_logger():
        return EpsilonLogger(
            num_examples=N, sampling="shuffle", delta=DELTA, ledger=tmp_path, verbose=0
        )

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    model = compiled()
    model.fit(X, Y, batch_size=BATCH, epochs=2, callbacks=[shuffle_logger()], verbose=0)
    model.save(tmp_path / "m.keras")
    for passes in (3, 4):
        new_process()
        again, log = keras.models.load_model(tmp_path / "m.keras"), shuffle_logger()
        again.fit(X, Y, batch_size=BATCH, epochs=3, callbacks=[log, Stops()], verbose=0)
        again.save(tmp_path / "m.keras")
        assert log.steps == 10 + 2 * (passes - 2)
        assert log.epsilon == pytest.approx(shuffled(passes), rel=1e-9)


def test_a_ledger_of_other_data(tmp_path, new_process):
    train(compiled(), logger(tmp_path), 1)
    new_process()
    with pytest.raises(LedgerError, match="num_examples 40; this one has 41"):
        EpsilonLogger(num_examples=N + 1, sampling="shuffle", delta=DELTA, ledger=tmp_path)
    whole = keras_dp.PrivacyLedger(tmp_path / "whole.json", num_examples=N + 20, name="all")
    assert train(compiled(), logger(whole), 1) == pytest.approx([poisson(5)], rel=1e-9)
    small = keras_dp.PrivacyLedger(num_examples=N - 1)
    with pytest.raises(LedgerError, match="uses 40 examples, but the ledger is of .* 39"):
        train(compiled(), logger(small), 1)


KILLED = """
import os, pathlib, signal, sys
import keras
from tests.callbacks.runs import DELTA, compiled, sampler
from keras_dp.callbacks import EpsilonLogger

folder, batches = pathlib.Path(sys.argv[1]), sampler()

class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        made = int(self.model.optimizer.iterations)
        (folder / "made").write_text(str(made))
        self.model.save_weights(folder / "out.weights.h5")  # released in the middle of an epoch
        if made == 8:
            os.kill(os.getpid(), signal.SIGKILL)

callbacks = [
    EpsilonLogger(batches, delta=DELTA, ledger=folder, verbose=0),
    keras.callbacks.BackupAndRestore(folder / "back"),
    Kill(),
]
compiled().fit(batches, epochs=3, callbacks=callbacks, verbose=0)
"""


def test_a_run_that_is_killed_and_resumed(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, check=False, capture_output=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    path = tmp_path / "privacy_ledger.json"
    assert int((tmp_path / "made").read_text()) == 8
    spent = on_file(path)
    assert spent >= 8  # all that had reached the outside, and what was reserved
    model, log = compiled(), logger(tmp_path)
    assert log.steps == spent and log.epsilon >= poisson(8)
    epsilons = train(model, log, 3, keras.callbacks.BackupAndRestore(tmp_path / "back"))
    assert len(epsilons) == 2 and int(model.optimizer.iterations) == 15  # from update 5 on
    assert epsilons == pytest.approx([poisson(spent + 5), poisson(spent + 10)], rel=1e-9)


ORDERLY = """
import sys
from tests.callbacks.runs import BATCH, DELTA, X, Y, compiled, sampler
from keras_dp.callbacks import EpsilonLogger

batches, model = sampler(), compiled()
logger = EpsilonLogger(batches, delta=DELTA, ledger=sys.argv[1], verbose=0)
model.fit(batches, callbacks=[logger], verbose=0)
for _ in range(30):
    model.train_on_batch(X[:BATCH], Y[:BATCH])
"""


@pytest.mark.slow
def test_an_orderly_end_leaves_what_was_spent_on_file(tmp_path):
    path = tmp_path / "ledger.json"
    done = subprocess.run(
        [sys.executable, "-c", ORDERLY, str(path)], cwd=ROOT, check=False, capture_output=True
    )
    assert done.returncode == 0 and b"Error" not in done.stderr, done.stderr.decode()
    assert on_file(path) == 35


def test_the_ledger_holds_nothing_of_the_data(tmp_path):
    path = tmp_path / "ledger.json"
    model = compiled()
    train(model, logger(path), 1)
    content = json.loads(path.read_text())
    (entry,) = content["entries"]
    assert set(content) == {"format", "version", "data", "entries", "checksum"}
    assert set(entry) == {"run", "writer", "start", "phase", "revision"}
    numbers = [v for v in entry["phase"].values() if isinstance(v, float)]
    assert numbers == [2.0] and np.isfinite(model.get_weights()[0]).all()


def test_an_optimizer_that_is_replaced_can_be_freed():
    model, log = compiled(), logger(None)
    train(model, log, 1)
    model.train_on_batch(X[:BATCH], Y[:BATCH])
    replaced = weakref.ref(model.optimizer)
    model.compile(sgd(), loss="mse")
    model.train_function = None
    gc.collect()
    assert train(model, log, 1) == pytest.approx([poisson(11)], rel=1e-9)
    gc.collect()
    assert replaced() is None and log.steps == 11
