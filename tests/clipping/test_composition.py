"""Taking a model apart: what needs no trial run, what needs one, and what cannot be taken apart."""

import keras
import numpy as np
import pytest
from keras import layers as L

import keras_dp
from keras_dp.clipping import alignment, composition
from tests.fixtures import zoo


def _model(shape, call, **kwargs):
    inputs = keras.Input(shape, **kwargs)
    return keras.Model(inputs, call(inputs))


def _parts(model):
    parts = composition.parts_to_try(model)
    return None if parts is None else [layer.name for layer, _ in parts]


def test_layers_of_keras_need_no_trial():
    for name in ("dense", "conv2d", "attention", "nested", "frozen", "siamese"):
        assert _parts(zoo.build(name)) in ([], None), name
    assert _parts(zoo.build("dense")) == []
    assert _parts(zoo.build("nested")) == []
    assert _parts(_model((4,), lambda x: x + L.Dense(4)(x))) == []


def test_layers_of_the_user_are_tried_by_themselves():
    twice = L.Lambda(lambda x: 2 * x, name="twice")
    odd = L.Dense(4, activation=lambda x: x**3, name="odd")
    model = _model((4,), lambda x: odd(keras.Sequential([keras.Input((4,)), twice])(x)))
    assert _parts(model) == ["twice", "odd"]
    assert alignment.rows_are_examples(model, model.trainable_variables, model.inputs).aligned


@pytest.mark.parametrize(
    "layer",
    [
        L.Lambda(lambda x: x - keras.ops.mean(x, 0)),
        L.Dense(4, activation=lambda x: x - keras.ops.mean(x, 0), name="own"),
        L.Activation(lambda x: keras.ops.flip(x, 0)),
    ],
)
def test_coupling_in_a_part_is_refused(layer):
    model = _model((4,), lambda x: L.Dense(3)(layer(L.Dense(4)(x))))
    optimizer = keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4)
    model.compile(optimizer, loss="sparse_categorical_crossentropy")
    with pytest.raises(keras_dp.IncompatibleModelError, match="influence each other"):
        model.fit(np.ones((4, 4), "float32"), np.zeros(4, "int32"), verbose=0)


class OwnCall(keras.Model):
    def call(self, x):
        return super().call(x)


class OwnStep(keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def test_what_cannot_be_taken_apart():
    inputs = keras.Input((4,))
    shared = L.Lambda(lambda x: x + 1)
    cases = {
        "a flip": _model((4,), lambda x: L.Dense(3)(keras.ops.flip(x, 0))),
        "an operation along the batch": _model((4,), lambda x: x - keras.ops.mean(x, 0)),
        "an axis meets the batch": keras.Model(
            inputs, L.Dense(3)(inputs) + L.Dense(3)(L.RepeatVector(2)(inputs))
        ),
        "a larger constant": _model((4,), lambda x: x + np.zeros((2, 5, 4), "float32")),
        "a constant beside the examples": _model(
            (2, 4), lambda x: L.MultiHeadAttention(1, 4)(x, np.zeros((1, 2, 4), "float32"))
        ),
        "two calls": _model((4,), lambda x: shared(shared(x))),
        "an argument": _model((4,), lambda x: L.Lambda(lambda x, mask=None: x)(x, training=True)),
        "a call of its own": OwnCall(inputs, L.Dense(3)(inputs)),
    }
    for reason, model in cases.items():
        assert _parts(model) is None, reason
    assert _parts(OwnStep(inputs, L.Dense(3)(inputs))) == []
    patched = zoo.build("dense")
    object.__setattr__(patched, "call", lambda x, training=None: keras.ops.flip(x, 0))
    assert _parts(patched) is None


@pytest.mark.parametrize("name", sorted(zoo.ZOO.keys() - {"tied"}))
def test_what_is_taken_on_its_word_holds_in_a_trial(name):
    model = zoo.build(name)
    if _parts(model) is not None:
        trial = alignment._rows_are_examples(model, model.trainable_variables, model.inputs[0])
        assert trial.aligned is not False
