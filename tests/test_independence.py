"""The trial run: does it see couplings, never invent one, and leave no trace?"""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from keras_dp.independence import couples_examples, first_coupling_operation


def functional(call, shape=(6,), dtype="float32"):
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, call(inputs))


def through(function, **kwargs):
    """A model that applies `function` between two dense layers."""
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(5),
            layers.Lambda(function, name="between", **kwargs),
            layers.Dense(3),
        ]
    )


class Subclassed(keras.Model):
    def __init__(self, function=lambda x: x, embed=False):
        super().__init__()
        self.first = layers.Embedding(10, 4) if embed else layers.Dense(4)
        self.last = layers.Dense(2)
        self.function = function

    def call(self, x):
        return self.last(self.function(self.first(x)))


class Noise(layers.Layer):
    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


class Counter(layers.Layer):
    """Changes a variable of its own at each call, and adds a loss."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        self.add_loss(ops.mean(x))
        return x * (1.0 + self.calls)


COUPLING = {
    "mean": lambda x: x - ops.mean(x, axis=0, keepdims=True),
    "looks back": lambda x: ops.cumsum(x, axis=0),
    "looks ahead": lambda x: ops.flip(ops.cumsum(ops.flip(x, axis=0), axis=0), axis=0),
    "next row": lambda x: ops.concatenate([x[1:], x[-1:]], axis=0),
    "first row": lambda x: x - x[:1],
    "other half": lambda x: x + ops.roll(x, ops.shape(x)[0] // 2, axis=0),
    "stopped gradient": lambda x: x / ops.stop_gradient(ops.std(x, axis=0)),
    "softmax": lambda x: ops.softmax(x, axis=0),
    "order": lambda x: ops.sort(x, axis=0),
    "weak": lambda x: x + 1e-3 * ops.mean(x, axis=0),
}


def test_coupling_is_seen_and_located():
    models = {name: through(function) for name, function in COUPLING.items()}
    seen = {name: couples_examples(model) for name, model in models.items()}
    assert seen == dict.fromkeys(COUPLING, True)
    located = {name: first_coupling_operation(model).name for name, model in models.items()}
    assert located == dict.fromkeys(COUPLING, "between")


INDEPENDENT = {
    "identity": lambda: through(lambda x: x),
    "row mean": lambda: through(lambda x: x - ops.mean(x, axis=1, keepdims=True)),
    "nan in every row": lambda: functional(lambda x: ops.concatenate([x, x * np.nan], axis=1)),
    "dropout": lambda: functional(lambda x: layers.Dense(3)(layers.Dropout(0.5)(x))),
    "one mask for the batch": lambda: functional(layers.Dropout(0.5, noise_shape=(1, 6))),
    "gaussian noise": lambda: functional(layers.GaussianNoise(1.0)),
    "unseeded keras random": lambda: through(lambda x: x + keras.random.normal(ops.shape(x))),
    "python random": lambda: through(lambda x: x * random.random()),
    "numpy random": lambda: through(lambda x: x * np.random.rand()),
    "frozen batch norm": lambda: functional(layers.BatchNormalization(trainable=False)),
    "counts its calls": lambda: functional(Counter()),
    "embedding": lambda: functional(layers.Embedding(2, 3), (5,), "int32"),
    "embedding of floats": lambda: functional(layers.Embedding(2, 3), (5,)),
    "pixels": lambda: functional(lambda x: ops.floor(x / 64.0) * 64.0),
    "booleans": lambda: functional(lambda x: layers.Dense(2)(ops.cast(x, "float32")), (5,), "bool"),
    "open sizes": lambda: functional(
        lambda x: layers.GlobalAveragePooling2D()(layers.Conv2D(2, 3, strides=8)(x)),
        (None, None, 3),
    ),
    "open volume": lambda: functional(layers.GlobalMaxPooling3D(), (None, None, None, 2)),
    "half": lambda: functional(layers.Dense(3, dtype="mixed_float16")),
    "two outputs": lambda: functional(lambda x: {"a": layers.Dense(2)(x), "b": x}),
    "lstm": lambda: functional(layers.LSTM(3), (4, 2)),
    "entries of a row in several rows": lambda: functional(lambda x: ops.reshape(x, (-1, 1))),
}


def test_independent_examples_are_left_in_peace():
    models = {name: make() for name, make in INDEPENDENT.items()}
    seen = {name: couples_examples(model) for name, model in models.items()}
    assert seen == dict.fromkeys(INDEPENDENT, False)
    located = {name: first_coupling_operation(model) for name, model in models.items()}
    assert located == dict.fromkeys(INDEPENDENT)


UNDECIDED = {
    "fails": lambda: functional(lambda x: layers.Dense(2)(layers.Lambda(_refuse, (6,))(x))),
    "strings": lambda: functional(
        layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot"), (1,), "string"
    ),
    "sparse": lambda: _sparse_input(),
    "one row": lambda: _fixed_batch(1, lambda x: x - ops.mean(x, axis=0)),
    "own random numbers": lambda: functional(Noise()),
    "own random numbers and coupling": lambda: functional(
        lambda x: Noise()(layers.BatchNormalization()(x))
    ),
    "constant": lambda: functional(lambda x: 0.0 * x),
    "nothing but nan": lambda: functional(lambda x: x * np.nan),
    "never called": lambda: Subclassed(),
}


def _refuse(x):
    if not isinstance(x, keras.KerasTensor):
        raise RuntimeError("not on random data")
    return x


def _sparse_input():
    inputs = keras.Input((6,), sparse=True)
    return keras.Model(inputs, layers.Dense(2)(inputs))


def _fixed_batch(size, call):
    inputs = keras.Input(batch_shape=(size, 6))
    return keras.Model(inputs, call(inputs))


def _called_once(model, batch):
    model(batch)
    return model


def test_undecided_is_none():
    seen = {name: couples_examples(make()) for name, make in UNDECIDED.items()}
    assert seen == dict.fromkeys(UNDECIDED)


def test_fixed_batch_size_takes_precedence():
    assert couples_examples(_fixed_batch(3, lambda x: x - ops.mean(x, axis=0))) is True
    assert couples_examples(_fixed_batch(2, lambda x: x - ops.flip(x, axis=0))) is True
    assert couples_examples(_fixed_batch(5, layers.Dense(2))) is False


def test_nan_that_another_row_brings_in_or_takes_away_is_seen():
    # The rows that replace the first ones have three times their spread.
    assert couples_examples(functional(lambda x: ops.where(ops.max(x) > 4.0, np.nan, x))) is True
    assert couples_examples(functional(lambda x: ops.where(ops.max(x) < 4.0, np.nan, x))) is True


def test_output_without_batch_axis_belongs_to_every_row():
    assert couples_examples(functional(lambda x: ops.mean(layers.Dense(2)(x)))) is True


def test_rows_behind_constant_weights_are_seen():
    """A zero head, or a residual branch scaled by zero, would hide all before it."""

    def zero_head(x):
        x = layers.BatchNormalization()(x)
        return layers.Dense(3, kernel_initializer="zeros")(x)

    def zero_scale(x):
        branch = layers.BatchNormalization(gamma_initializer="zeros")(layers.Dense(6)(x))
        return x + branch

    def tiny_head(x):
        tiny = keras.initializers.RandomNormal(stddev=1e-8)
        return layers.Dense(3, kernel_initializer=tiny)(layers.BatchNormalization()(x))

    for call in (zero_head, zero_scale, tiny_head):
        assert couples_examples(functional(call)) is True
    assert couples_examples(functional(layers.Dense(3, kernel_initializer="zeros"))) is False


def test_nested_structure_of_inputs():
    inputs = {"a": keras.Input((3,), name="a"), "b": [keras.Input((4,), dtype="int32", name="b")]}
    embedded = layers.Flatten()(layers.Embedding(2, 3)(inputs["b"][0]))
    joined = layers.Concatenate()([inputs["a"], embedded])
    assert couples_examples(keras.Model(inputs, layers.Dense(1)(joined))) is False
    coupled = joined - ops.mean(joined, axis=0, keepdims=True)
    assert couples_examples(keras.Model(inputs, coupled)) is True


def test_subclassed_model_uses_what_it_was_called_on():
    def centred(x):
        return x - ops.mean(x, axis=0)

    batch = np.ones((2, 6), "float32")
    assert couples_examples(_called_once(Subclassed(), batch)) is False
    coupled = _called_once(Subclassed(centred), batch)
    assert couples_examples(coupled) is True
    assert first_coupling_operation(coupled) is coupled


def test_subclassed_model_uses_the_given_spec():
    model = Subclassed(lambda x: x - ops.max(x, axis=0), embed=True)
    model(tf.zeros((7, 5), tf.int64))
    assert couples_examples(model, input_spec=tf.TensorSpec((7, 5), tf.int64)) is True
    model = _called_once(Subclassed(embed=True), np.ones((2, 5), "int64"))
    assert couples_examples(model, input_spec=tf.zeros((7, 5), tf.int64)) is False
    for unknown in (tf.TensorSpec(None, tf.int64), [tf.TensorSpec((7, 5), tf.int64), None]):
        assert couples_examples(model, input_spec=unknown) is None


def test_nothing_is_written():
    inputs = keras.Input((6,))
    x = Counter()(layers.Dropout(0.5)(layers.BatchNormalization()(inputs)))
    x = layers.Lambda(lambda t: t + keras.random.normal(ops.shape(t)))(x)
    model = keras.Model(inputs, layers.Dense(2, kernel_initializer="zeros")(x))
    model(np.ones((2, 6), "float32"), training=True)
    keras.random.normal((1,))  # the shared generator exists from here on

    def state():
        shared = keras.src.random.seed_generator.global_seed_generator().state
        values = [np.asarray(v) for v in [*model.variables, shared]]
        return values, random.getstate(), repr(np.random.get_state())

    before = state()
    attributes = [dict(vars(layer)) for layer in model.layers]
    assert couples_examples(model) is True
    assert first_coupling_operation(model) is model.layers[1]
    after = state()
    for a, b in zip(before[0], after[0]):
        np.testing.assert_array_equal(a, b)
    assert before[1:] == after[1:]
    assert [set(a) for a in attributes] == [set(vars(layer)) for layer in model.layers]


def test_runs_while_a_training_step_is_traced():
    model = through(COUPLING["mean"])
    answers = []

    @tf.function
    def step(x):
        answers.append(couples_examples(model))
        return model(x)

    step(tf.zeros((2, 6)))
    assert answers == [True]


def test_location_is_the_innermost():
    inner = keras.Sequential(
        [keras.Input((6,)), layers.Dense(4), layers.Lambda(COUPLING["mean"], name="inner")]
    )
    model = functional(lambda x: layers.Dense(1)(layers.TimeDistributed(inner)(x)), (3, 6))
    assert first_coupling_operation(model).name == "inner"
    by_operation = functional(lambda x: layers.Dense(1)(x - ops.mean(x, axis=0)))
    assert type(first_coupling_operation(by_operation)).__name__ == "Mean"


def test_quantized_layers_are_located_too():
    model = functional(
        lambda x: layers.Dense(2)(layers.Dense(4, name="coupled", activation=COUPLING["mean"])(x))
    )
    model.get_layer("coupled").quantize("int8")
    assert first_coupling_operation(model).name == "coupled"


def test_one_row_is_refused():
    with pytest.raises(ValueError, match="num_rows must be at least 2.*received 1"):
        couples_examples(through(lambda x: x), num_rows=1)
