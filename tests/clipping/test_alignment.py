"""Which rows are the examples: layers that are called on what depends on no example."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp.clipping import alignment, gradients
from tests.fixtures import checks, zoo


def _classifier(layer, length=6, size=None):
    return keras.Sequential(
        [
            keras.Input((length,), dtype="int32", batch_size=size),
            layer,
            L.GlobalAveragePooling1D(),
            L.Dense(zoo.CLASSES),
        ]
    )


def _alignment(model, length=6, size=None):
    spec = tf.TensorSpec([size, length], tf.int32)
    return alignment.rows_are_examples(model, list(model.trainable_variables), spec)


def _check_loop(model, x, y, jit_compile=False, static=False, **kwargs):
    rng = np.random.default_rng(3)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape))
    norms, _ = checks.plain_loop(model, x, y, 1.0)
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=float(np.median(norms)), noise_multiplier=0.0, batch_size=5, **kwargs
    )
    checks.check_loop(model, optimizer, x, y, static, jit_compile)


def _ids(length=6, size=5):
    rng = np.random.default_rng(0)
    x = rng.integers(0, zoo.VOCABULARY, (size, length)).astype("int32")
    return x, rng.integers(0, zoo.CLASSES, size).astype("int32")


def _functional(length):
    """Positions made by a Lambda in a functional model."""
    inputs = keras.Input((length,), dtype="int32")
    positions = L.Lambda(
        lambda x: keras.ops.arange(keras.ops.shape(x)[-1]), output_shape=lambda shape: shape[1:]
    )(inputs)
    x = L.Embedding(zoo.VOCABULARY, 4)(inputs) + L.Embedding(length, 4)(positions)
    return keras.Model(inputs, L.Dense(zoo.CLASSES)(L.GlobalAveragePooling1D()(x)))


class LearnedQueries(L.Layer):
    """The example's products with a dense layer of a fixed [3, 4], and with one of [1, 3, 4]."""

    def __init__(self):
        super().__init__()
        self.token = L.Embedding(zoo.VOCABULARY, 4)
        self.denses = [L.Dense(4), L.Dense(4, activation="tanh")]

    def build(self, shape):
        self.token.build()
        for dense in self.denses:
            dense.build((None, 4))

    def call(self, x):
        constant = keras.ops.reshape(keras.ops.cos(keras.ops.arange(12, dtype="float32")), (3, 4))
        queries = self.denses[0](constant), self.denses[1](constant[None])
        tokens = self.token(x)
        first, second = (tokens @ keras.ops.swapaxes(q, -1, -2) for q in queries)
        return first + 2 * second


class TokensAtPositions(zoo.TokenAndPosition):
    """Calls the table of positions on constants and on the examples."""

    def call(self, x):
        ids = x % self.position.input_dim
        return self.token(x) + self.position(ids) * self.position(self.positions(x))


LAYERS = {
    "arange": lambda: _classifier(zoo.TokenAndPosition(6)),
    "unit axis": lambda: _classifier(zoo.TokenAndPosition(6, unit_axis=True)),
    "constants and examples": lambda: _classifier(TokensAtPositions(6)),
    "with a unit axis": lambda: _classifier(TokensAtPositions(6, unit_axis=True)),
    "functional": lambda: _functional(6),
    "learned queries": lambda: _classifier(LearnedQueries()),
}


@pytest.mark.filterwarnings("error:keras_dp")
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_constants(name, jit_compile):
    model = LAYERS[name]()
    seen = _alignment(model)
    assert seen.aligned and seen.constants is not None
    _check_loop(model, *_ids(), jit_compile, static=jit_compile)


@pytest.mark.filterwarnings("error:keras_dp")
@pytest.mark.parametrize("length", [4, 5])
@pytest.mark.parametrize("layer", [zoo.TokenAndPosition, TokensAtPositions])
@pytest.mark.parametrize("static", [False, True])
def test_as_many_positions_as_examples(layer, length, static):
    """4 is the number of rows of the trial run, 5 that of the batch."""
    model = _classifier(layer(length), length)
    assert _alignment(model, length).constants is not None
    _check_loop(model, *_ids(length), static=static)
    _check_loop(model, *_ids(length), static=static, microbatch_size=2)


@pytest.mark.filterwarnings("error:keras_dp")
def test_an_open_length_and_a_fixed_batch():
    model = _classifier(zoo.TokenAndPosition(70), None)
    _check_loop(model, *_ids(9))
    model = _classifier(zoo.TokenAndPosition(6), 6, size=5)
    _check_loop(model, *_ids())


@pytest.mark.filterwarnings("ignore:keras_dp. seed=1 fixes the noise")
@pytest.mark.parametrize("unit_axis", [False, True])
def test_pair(unit_axis):
    model = _classifier(zoo.TokenAndPosition(6, unit_axis=unit_axis))
    x, y = _ids()
    corrupted = x.copy()
    corrupted[0] = (x[0] + 3) % zoo.VOCABULARY

    def make():
        return keras_dp.DPSGD(
            1.0, l2_norm_clip=0.1, noise_multiplier=1.0, batch_size=3, seed=1, backend="layerwise"
        )

    checks.check_pair(model, make, x, y, corrupted, 0.1, batch_size=3)


class ExpandedLater(zoo.TokenAndPosition):
    """Gives the embedded positions an axis for the batch, which they then have already."""

    def call(self, x):
        return self.token(x) + self.position(self.positions(x))[None]


class MeanOfPositions(zoo.TokenAndPosition):
    """Uses the number of rows of the embedded positions."""

    def call(self, x):
        embedded = self.position(self.positions(x))
        return self.token(x) + keras.ops.mean(embedded, 0)


class CountsPositions(zoo.TokenAndPosition):
    """Multiplies by the number of rows of the embedded positions."""

    def call(self, x):
        embedded = self.position(self.positions(x))
        return self.token(x) + embedded * keras.ops.cast(keras.ops.shape(embedded)[0], "float32")


@pytest.mark.parametrize("layer", [ExpandedLater, MeanOfPositions, CountsPositions])
def test_what_computes_something_else_stays_vectorized(layer):
    model = _classifier(layer(6))
    assert _alignment(model) == alignment.Alignment(False)
    with pytest.warns(UserWarning, match="backend='vectorized'"):
        _check_loop(model, *_ids())


def test_an_activity_regularizer_on_constants_stays_vectorized():
    layer = zoo.TokenAndPosition(6)
    layer.position.activity_regularizer = keras.regularizers.L2(0.1)
    model = _classifier(layer)
    x, y = _ids()

    def loss(y, p, sample_weight=None):
        return checks._crossentropy()(y, p) + sum(model.losses)

    want = checks.plain_loop(model, x, y, 0.1, loss=loss)[1]
    optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=0.1, noise_multiplier=0.0, batch_size=5)
    model.compile(optimizer, loss=checks._crossentropy())
    with pytest.warns(UserWarning, match="backend='vectorized'"):
        got = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
    checks.assert_sums_close(got.sums, want)


def test_a_second_trial_only_where_it_is_needed(monkeypatch):
    given = []
    plain = alignment._Trial.verdict
    monkeypatch.setattr(
        alignment._Trial,
        "verdict",
        lambda self, spec: given.append(self.given) or plain(self, spec),
    )
    assert _alignment(zoo.build("text")).constants is None
    assert not any(given)
    _alignment(LAYERS["arange"]())
    assert sum(constants is not None for constants in given) == 1


class ChangesItsCalls(L.Layer):
    """Calls its layers in another order when the examples are more than in the trial."""

    def __init__(self):
        super().__init__()
        self.token, self.position = L.Embedding(zoo.VOCABULARY, 4), L.Embedding(6, 4)

    def build(self, shape):
        self.token.build()
        self.position.build()

    def call(self, x):
        if x.shape[0] == 5:
            embedded = self.token(x)
            return embedded + self.position(keras.ops.arange(6))
        position = self.position(keras.ops.arange(6))
        return self.token(x) + position


def test_calls_in_another_order_than_in_the_trial_are_refused():
    model = _classifier(ChangesItsCalls())
    x, y = _ids()
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=0.1, noise_multiplier=0.0, batch_size=5, backend="layerwise"
    )
    with pytest.raises(keras_dp.IncompatibleModelError, match="trial run called another one"):
        keras_dp.clipped_gradients(model, x, y, optimizer=optimizer, loss=checks._crossentropy())


class Permuted(L.Layer):
    """Calls a dense layer on zeros in the order of the examples, or backwards."""

    def __init__(self, backwards):
        super().__init__()
        self.dense, self.backwards = L.Dense(4), backwards

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        z = self.dense(keras.ops.zeros_like(x))
        return x * (keras.ops.flip(z, 0) if self.backwards else z)


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("tracing", [False, True])
def test_gradients_tell_where_outputs_do_not(backwards, tracing):
    """What the dense layer gives is the same for every row; its gradient is not."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Permuted(backwards)(inputs))
    spec = tf.TensorSpec([None, 4])
    seen = []

    def look():
        with tf.init_scope():
            seen.append(
                alignment.rows_are_examples(model, list(model.trainable_variables), spec).aligned
            )

    (tf.function(look) if tracing else look)()
    assert seen == [not backwards]


def test_a_compute_loss_of_its_own_keeps_the_constants():
    """By name, the layerwise backend takes the user's word, and still repeats the positions."""

    class OwnLoss(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, y_pred, sample_weight)

    plain = LAYERS["arange"]()
    model = OwnLoss(plain.inputs, plain.outputs)
    x, y = _ids()
    model.compile(
        keras_dp.DPSGD(
            1.0, l2_norm_clip=0.1, noise_multiplier=0.0, batch_size=5, backend="layerwise"
        ),
        loss=checks._crossentropy(),
    )
    seen = gradients._require_valid(model, None, tf.constant(x), "layerwise")
    assert seen.aligned is None and seen.constants is not None
    want = checks.plain_loop(plain, x, y, 0.1)[1]
    got = keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer)
    checks.assert_sums_close(got.sums, want)
