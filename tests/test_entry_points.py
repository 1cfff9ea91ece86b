"""The wrappers of `fit` and `train_on_batch`: they see, ask, and change nothing else."""

import copy
import gc
import inspect
import weakref

import keras
import numpy as np
import pytest

from keras_dp import _keras, entry_points

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", loss="mse")
    return model


class Sees(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.fit = entry_points.current_fit(self.model)


def test_callbacks_see_the_arguments_of_fit():
    model, sees = compiled(), Sees()
    model.fit(X, Y, 4, validation_split=0.5, callbacks=[sees], verbose=0)
    assert sees.fit.x is X and sees.fit.y is Y
    assert (sees.fit.batch_size, sees.fit.validation_split, sees.fit.epochs) == (4, 0.5, 1)
    assert sees.fit.steps_per_epoch is None and "self" not in sees.fit.arguments
    with pytest.raises(AttributeError, match="no_such"):
        _ = sees.fit.no_such
    assert entry_points.current_fit(model) is None


def test_the_fit_is_over_after_an_error():
    class Fails(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise KeyboardInterrupt

    model = compiled()
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, callbacks=[Fails()], verbose=0)
    assert entry_points.current_fit(model) is None


def test_a_fit_within_a_fit():
    outer, inner, seen = compiled(), compiled(), []

    class Nested(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            inner.fit(X[:4], Y[:4], verbose=0)
            seen.append(entry_points.current_fit(self.model).x)

    outer.fit(X, Y, callbacks=[Nested()], verbose=0)
    assert seen[0] is X


class Asked:
    def __init__(self):
        self.models = []

    def before_train_on_batch(self, model):
        self.models.append(model)


def test_who_asked_is_told_until_the_next_fit():
    model, asked = compiled(), Asked()
    entry_points.ask_before_train_on_batch(model, asked)
    for _ in range(2):
        model.train_on_batch(X, Y)
    compiled().train_on_batch(X, Y)
    assert asked.models == [model, model]
    model.fit(X, Y, verbose=0)
    model.train_on_batch(X, Y)
    assert len(asked.models) == 2


def test_models_and_callbacks_are_freed():
    model, asked = compiled(), Asked()
    entry_points.ask_before_train_on_batch(model, asked)
    asked.models.append(model)
    gone = weakref.ref(asked)
    del model, asked
    gc.collect()
    assert gone() is None


def test_models_are_saved_and_copied_without_it(tmp_path):
    model = compiled()
    entry_points.ask_before_train_on_batch(model, Asked())
    model.save(tmp_path / "model.keras")
    for other in (keras.models.load_model(tmp_path / "model.keras"), copy.deepcopy(model)):
        other.compile("sgd", loss="mse")
        other.train_on_batch(X, Y)
        np.testing.assert_equal(model.layers[0].units, other.layers[0].units)


def test_installing_twice_changes_nothing():
    before = _keras.TensorFlowTrainer.fit, _keras.TensorFlowTrainer.train_on_batch
    entry_points.install()
    assert (_keras.TensorFlowTrainer.fit, _keras.TensorFlowTrainer.train_on_batch) == before


@pytest.mark.parametrize("name", ["fit", "train_on_batch"])
def test_signatures_and_docs_stay(name):
    wrapped = getattr(keras.Model, name)
    assert wrapped.__doc__ == inspect.unwrap(wrapped).__doc__
    assert list(inspect.signature(wrapped).parameters)[1:3] == ["x", "y"]


@pytest.mark.parametrize(
    "argument", ["x", "batch_size", "validation_split", "validation_data", "steps_per_epoch"]
)
def test_keras_has_the_arguments_that_are_read(argument):
    assert argument in inspect.signature(keras.Model.fit).parameters
