"""The run id of a DP optimizer: whose updates a counter counts."""

import copy

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
PRIVATE = dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=8)


def compiled(optimizer=None):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(optimizer=optimizer or keras_dp.DPAdam(0.1, **PRIVATE), loss="mse")
    return model


@pytest.fixture(name="trained")
def _trained():
    model = compiled()
    model.train_on_batch(X, Y)
    return model


def test_every_optimizer_begins_a_run_of_its_own(trained):
    ids = {keras_dp.DPSGD(0.1, **PRIVATE).run_id for _ in range(3)}
    ids |= {type(trained.optimizer).from_config(trained.optimizer.get_config()).run_id}
    ids |= {copy.deepcopy(trained.optimizer).run_id, trained.optimizer.run_id}
    assert len(ids) == 6 and all(len(run) == 32 for run in ids)


@pytest.mark.parametrize("way", ["model file", "weights file", "tf.train.Checkpoint"])
def test_checkpoints_carry_it(trained, way, tmp_path):
    path = str(tmp_path / "saved")
    if way == "model file":
        trained.save(path + ".keras")
        restored = keras.models.load_model(path + ".keras")
    else:
        restored = compiled()
        restored.optimizer.build(restored.trainable_variables)
        if way == "weights file":
            trained.save_weights(path + ".weights.h5")
            restored.load_weights(path + ".weights.h5")
        else:
            saved = tf.train.Checkpoint(model=trained, optimizer=trained.optimizer).save(path)
            tf.train.Checkpoint(model=restored, optimizer=restored.optimizer).restore(saved)
    assert restored.optimizer.run_id == trained.optimizer.run_id
    assert int(restored.optimizer.iterations) == 1


def test_the_state_of_the_keras_optimizer_keeps_its_layout(trained):
    plain = compiled(keras.optimizers.Adam(0.1))
    plain.train_on_batch(X, Y)
    shapes = [tuple(v.shape) for v in plain.optimizer.variables]
    assert [tuple(v.shape) for v in trained.optimizer.variables] == shapes


def test_state_of_an_optimizer_without_a_run_can_be_loaded(trained, tmp_path):
    plain = compiled(keras.optimizers.Adam(0.1))
    plain.fit(X, Y, epochs=3, verbose=0)
    plain.save_weights(tmp_path / "plain.weights.h5")
    before = trained.optimizer.run_id
    trained.load_weights(tmp_path / "plain.weights.h5")
    assert trained.optimizer.run_id == before and int(trained.optimizer.iterations) == 3


def test_state_that_is_not_loaded_brings_no_id(trained, tmp_path):
    trained.save_weights(tmp_path / "adam.weights.h5")
    other = compiled(keras_dp.DPSGD(0.1, **PRIVATE))
    before = other.optimizer.run_id
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        other.load_weights(tmp_path / "adam.weights.h5")
    assert other.optimizer.run_id == before and int(other.optimizer.iterations) == 0
