"""Taking a model apart: what needs no trial run, what needs one, and what cannot be taken apart."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp.clipping import alignment, composition
from tests.fixtures import zoo


def _model(shape, call, **kwargs):
    inputs = keras.Input(shape, **kwargs)
    return keras.Model(inputs, call(inputs))


def _flipped(shape):
    return _model(shape, lambda x: keras.ops.flip(x, 0))


def _parts(model):
    parts = composition.parts_to_try(model)
    return None if parts is None else [layer.name for layer, _ in parts]


def test_layers_of_keras_need_no_trial():
    for name in ("dense", "conv2d", "attention", "nested", "frozen", "siamese"):
        assert _parts(zoo.build(name)) in ([], None), name
    assert _parts(zoo.build("dense")) == []
    assert _parts(zoo.build("nested")) == []
    assert _parts(_model((4,), lambda x: x + L.Dense(4)(x))) == []


@pytest.mark.parametrize(
    "layer",
    [
        L.Lambda(lambda x: 2 * x, name="own"),
        L.Dense(4, activation=lambda x: x**3, name="own"),
        L.RandomFlip(name="own", data_format="channels_last"),
    ],
)
def test_another_layer_is_tried_by_itself(layer):
    shape = (6, 6, 4)
    model = _model(shape, lambda x: L.Dense(4)(keras.Sequential([keras.Input(shape), layer])(x)))
    assert _parts(model) == ["own"]
    assert alignment.rows_are_examples(model, model.trainable_variables, model.inputs).aligned


class Left(L.Layer):
    """Leaves what it saw for another layer."""

    def call(self, x):
        self.left = x
        return x


def test_two_other_layers_are_tried_together():
    left = Left()
    reads = L.Lambda(lambda x: x - keras.ops.mean(left.left, 0))
    model = _model((4,), lambda x: L.Dense(3)(reads(left(x))))
    assert _parts(model) is None
    _assert_refused(model)


def _assert_refused(model):
    """By training as by ``validate``."""
    assert keras_dp.validate(model)
    optimizer = keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4)
    model.compile(optimizer, loss=lambda y, p: keras.ops.sum(p))
    x = [np.ones((4, *t.shape[1:]), "float32") for t in model.inputs]
    with pytest.raises(keras_dp.IncompatibleModelError, match="influence each other"):
        model.train_on_batch(x[0] if len(x) == 1 else x, np.zeros(4, "int32"))


@pytest.mark.parametrize(
    "layer",
    [
        L.Lambda(lambda x: x - keras.ops.mean(x, 0)),
        L.Dense(4, activation=lambda x: x - keras.ops.mean(x, 0), name="own"),
        L.Activation(lambda x: keras.ops.flip(x, 0)),
        # Functions of TensorFlow and Keras, and what they make of functions of the user's.
        L.Dense(4, activation=tf.nn.l2_normalize, name="own"),
        L.Activation(keras.ops.flip),
        L.Lambda(keras.ops.softmax, arguments={"axis": 0}),
        L.Dense(4, activation=tf.function(lambda x: x - tf.reduce_mean(x, 0)), name="own"),
        L.Dense(4, activation=L.Lambda(lambda x: x[::-1]).call, name="own"),
        L.Dense(4, activation=_flipped((4,)), name="own"),
    ],
)
def test_coupling_in_a_part_is_refused(layer):
    _assert_refused(_model((4,), lambda x: L.Dense(3)(layer(L.Dense(4)(x)))))


def _rank_2_attention(layer):
    inputs = keras.Input((4,))
    return keras.Model(inputs, L.Dense(3)(layer([L.Dense(4)(inputs), inputs])))


def _shared_merge():
    """One Multiply, first called on equal ranks."""
    merge, inputs = L.Multiply(), keras.Input((4,))
    merge([inputs, inputs])
    by_time = L.Dense(4)(L.Reshape((1, 4))(inputs))
    return keras.Model(inputs, L.Dense(3)(merge([by_time, inputs])))


def _masked_by_examples():
    """A float mask of rank 2, whose rows meet the one time step of the query."""
    query, value, mask = keras.Input((1, 5)), keras.Input((5, 5)), keras.Input((5,))
    outputs = L.MultiHeadAttention(2, 3)(query, value, attention_mask=mask)
    return keras.Model(
        [query, value, mask], L.Dense(1)(L.GlobalAveragePooling1D()(L.Dense(5)(outputs)))
    )


# Layers of Keras that couple examples by the way in which they are called.
COUPLING_CALLS = {
    "an image without channels": lambda: _model(
        (6, 6), lambda x: L.Dense(3)(L.RandomRotation(0.5)(L.Dense(6)(x)))
    ),
    "contrast of an image without channels": lambda: _model(
        (6, 6), lambda x: L.Dense(3)(L.RandomContrast((0.5, 0.6))(L.Dense(6)(x)))
    ),
    "rank 2 scores": lambda: _rank_2_attention(L.AdditiveAttention()),
    "rank 2 concatenated scores": lambda: _rank_2_attention(L.Attention(score_mode="concat")),
    "an axis known inside": lambda: _model(
        (2, 4), lambda x: L.Dense(3)(L.TimeDistributed(L.Softmax(axis=-2))(L.Dense(4)(x)))
    ),
    "a graph inside": lambda: _model(
        (2, 4), lambda x: L.Dense(3)(L.TimeDistributed(_flipped((4,)))(L.Dense(4)(x)))
    ),
    "a merge that broadcasts": _shared_merge,
    "a mask that broadcasts": _masked_by_examples,
}


@pytest.mark.parametrize("name", COUPLING_CALLS)
def test_coupling_by_the_call_is_refused(name):
    _assert_refused(COUPLING_CALLS[name]())


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
        "an argument": _model(
            (4,), lambda x: L.Lambda(lambda x, mask=None: x)(x, mask=np.ones((4, 4), bool))
        ),
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
