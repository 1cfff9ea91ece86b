"""PAIR: one example moves the private gradient by C / batch_size, whatever it holds."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from tests.fixtures import checks, zoo

CORRUPTIONS = {"huge": 1e30, "nan": np.nan, "inf": np.inf, "other": -3.0}


def _corrupted(x, value):
    x = x.copy()
    x[0] = 5 if x.dtype.kind == "i" else value
    return x


def _check(name, value, sensitivity=0.3, **args):
    model = zoo.build(name)
    x, y = zoo.batch(model)

    def make():
        return keras_dp.DPSGD(
            1.0, l2_norm_clip=sensitivity, noise_multiplier=1.0, batch_size=3, seed=1, **args
        )

    checks.check_pair(model, make, x, y, _corrupted(x, value), sensitivity, batch_size=3)


pytestmark = pytest.mark.filterwarnings("ignore:keras_dp. seed=1 fixes the noise")


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("name", zoo.FEW)
def test_models(name, corruption):
    _check(name, CORRUPTIONS[corruption])


@pytest.mark.parametrize(
    "args",
    [
        {"clipping": "automatic"},
        {"microbatch_size": 2},
        {"backend": "vectorized"},
        {"backend": "loop"},
    ],
    ids=str,
)
@pytest.mark.parametrize("corruption", ["nan", "huge"])
def test_arguments(args, corruption):
    _check("conv2d", CORRUPTIONS[corruption], **args)


def _with_random_layers():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            L.GaussianNoise(0.1, seed=3),
            L.Dense(5, activation="tanh"),
            L.Dropout(0.3, seed=4),
            L.Dense(3),
        ]
    )


COPIES, USERS = {"augmentations": 3}, {"examples_per_user": 2}
BOTH = {"augmentations": 2, "examples_per_user": 2}


def _slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "unit, corruption, backend",
    [
        (COPIES, "huge", "layerwise"),
        (USERS, "nan", "layerwise"),
        (BOTH, "huge", "layerwise"),
        _slow(BOTH, "nan", "vectorized"),
        _slow(USERS, "huge", "vectorized"),
        _slow(COPIES, "nan", "loop"),
        _slow(BOTH, "huge", "loop"),
    ],
    ids=str,
)
def test_units(unit, corruption, backend):
    """All copies of an example, and all rows of a user, move it by one clip together."""
    model, sensitivity, rows = _with_random_layers(), 0.3, unit.get("examples_per_user", 1)
    x, y = zoo.batch(zoo.build("dense"), 6)
    corrupted = x.copy()
    corrupted[:rows] = CORRUPTIONS[corruption]

    def make():
        return keras_dp.DPSGD(
            1.0,
            l2_norm_clip=sensitivity,
            noise_multiplier=1.0,
            batch_size=3,
            seed=1,
            backend=backend,
            **unit,
        )

    checks.check_pair(model, make, x, y, corrupted, sensitivity, batch_size=3, rows=rows)


@pytest.mark.parametrize("weights", [{0: 1e6, 1: 0.5, 2: 1.0}, {0: 0.0, 1: 1e30, 2: 1.0}], ids=str)
def test_class_weights_keep_the_bound(weights):
    """fit with arrays and class_weight: a weight scales the loss, and the clip bounds the rest."""
    x, y = zoo.batch(zoo.build("dense"), 8)
    y[0] = 0
    other = x.copy()
    other[0] = 1e4
    moved = []
    for data in (x, other):
        model = zoo.build("dense")
        optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=0.3, noise_multiplier=0.0, batch_size=4)
        model.compile(optimizer, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        before = model.get_weights()
        model.fit(data, y, batch_size=8, class_weight=weights, verbose=0, shuffle=False)
        moved.append(np.concatenate([np.ravel(a - b) for a, b in zip(model.get_weights(), before)]))
    for step in moved:
        assert np.linalg.norm(step) <= 8 * 0.3 / 4 + 1e-5
    assert np.linalg.norm(moved[0] - moved[1]) <= 2 * 0.3 / 4 + 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in zoo.ZOO if n not in zoo.FEW])
def test_zoo(name):
    names = list(CORRUPTIONS)
    _check(name, CORRUPTIONS[names[list(zoo.ZOO).index(name) % len(names)]])


def test_a_coupled_model_is_refused():
    """Mean over the batch in a Lambda: PAIR would fail, so training must not start."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Lambda(lambda x: x - keras.ops.mean(x, axis=0, keepdims=True)),
            keras.layers.Dense(3),
        ]
    )
    model.compile(
        keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=3),
        loss="sparse_categorical_crossentropy",
    )
    with pytest.raises(keras_dp.IncompatibleModelError, match="influence each other"):
        model.fit(*zoo.batch(zoo.build("dense")), verbose=0)


# Norms that rounding could make vanish -----------------------------------------------------


def _siamese_difference():
    one, two = keras.Input((64,)), keras.Input((64,))
    dense = L.Dense(64, use_bias=False)
    return keras.Model([one, two], L.Subtract()([dense(one), dense(two)]))


def _position_difference():
    inputs = keras.Input((2, 64))
    z = L.Dense(64, use_bias=False)(inputs)
    return keras.Model(inputs, z[:, 0] - z[:, 1])


def _convolution_difference():
    inputs = keras.Input((1, 8, 64))
    z = L.Conv2D(64, (1, 2), use_bias=False)(inputs)
    return keras.Model(inputs, z[:, 0, 0] - z[:, 0, 1])


@pytest.mark.parametrize("scale", [1e3, 1e5, 1e7, 1e14])
@pytest.mark.parametrize(
    "make", [_siamese_difference, _position_difference, _convolution_difference]
)
def test_gradients_that_cancel(make, scale):
    """Two huge, almost equal inputs: their terms cancel, and what is left is still clipped."""
    model = make()
    rng = np.random.default_rng(0)
    shapes = [(8, *i.shape[1:]) for i in model.inputs]
    x = [rng.normal(size=s).astype("float32") for s in shapes]
    base = rng.normal(size=64)
    other = [a.copy() for a in x]
    for k, a in enumerate(other):
        a[-1] = scale * base + 1.5 * k * rng.normal(size=64)
    if len(x) == 1:
        other[0][-1] += 1.5 * rng.normal(size=other[0][-1].shape)
    y = np.ones((8, 64), "float32")

    def loss(y, p):
        return keras.ops.sum(y * p, -1)

    sums = []
    for data in (x, other):
        optimizer = keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=1)
        model.compile(optimizer, loss=loss)
        data = data if len(data) > 1 else data[0]
        clipped = keras_dp.clipped_gradients(model, data, y, optimizer=optimizer)
        sums.append(np.concatenate([np.ravel(s) for s in clipped.sums]))
    assert np.linalg.norm(sums[0] - sums[1]) <= 2.001


def test_squares_that_underflow():
    """|a|^2 is zero in float32, |g| is huge: the product is 90, and is clipped to 1."""
    model = keras.Sequential([keras.Input((10000,)), L.Dense(1, use_bias=False)])
    optimizer = keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=1)
    model.compile(optimizer, loss=lambda y, p: y * p)
    x, y = np.full((1, 10000), 9e-20, "float32"), np.full((1, 1), 1e19, "float32")
    clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
    assert np.linalg.norm(clipped.sums[0]) <= 1.001


# Examples that influence each other --------------------------------------------------------


def _train(*layers, shape=(4,), size=4, **kwargs):
    model = keras.Sequential([keras.Input(shape), *layers, L.Flatten(), L.Dense(3)])
    model.compile(
        keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=3, **kwargs),
        loss="sparse_categorical_crossentropy",
    )
    x = np.random.default_rng(0).normal(size=(size, *shape)).astype("float32")
    model.train_on_batch(x, np.zeros(size, "int32"))
    return model


def test_a_model_that_the_trial_run_cannot_judge():
    """Batch norm over groups of four rows fails on other numbers of rows: never layerwise."""

    def ghost_norm(x):
        groups = keras.ops.reshape(x, (-1, 8, 4))
        return keras.ops.reshape(groups - keras.ops.mean(groups, 1, keepdims=True), (-1, 4))

    with (
        pytest.warns(UserWarning, match="trial run"),
        pytest.raises((ValueError, tf.errors.OpError)),
    ):
        _train(L.Lambda(ghost_norm), size=8)


def test_random_numbers_outside_keras():
    """tf.random hides the coupling from the trial run, so the examples are trained one by one."""
    layer = L.Lambda(lambda x: tf.nn.dropout(x, 0.5) - tf.reduce_mean(x, 0, keepdims=True))
    with pytest.warns(UserWarning, match="trains with backend='vectorized'"):
        _train(layer)


class Positions(L.Layer):
    """Adds a learned vector that is looked up by position: its rows belong to no example."""

    def __init__(self):
        super().__init__()
        self.table = L.Embedding(4, 6)

    def call(self, x):
        # The axis that the examples would take is added too late to be given to them.
        return x + self.table(keras.ops.arange(4))[None]


@pytest.mark.parametrize("size", [4, 5])
def test_rows_that_belong_to_no_example(size):
    with pytest.warns(UserWarning, match="vectorized.*not the examples"):
        _train(Positions(), shape=(4, 6), size=size)


def test_the_model_is_looked_at_again_after_a_change():
    model = keras.Sequential([keras.Input((4,)), L.Dense(5), L.Dense(3)])
    x, y = zoo.batch(zoo.build("dense"))

    def train():
        model.compile(
            keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=3),
            loss="sparse_categorical_crossentropy",
        )
        model.fit(x, y, verbose=0)

    train()
    model.pop()
    model.add(L.BatchNormalization())
    with pytest.raises(keras_dp.IncompatibleModelError, match="BatchNormalization"):
        train()


class RawState(L.Layer):
    """Keeps a mean of the data in a variable that Keras does not know."""

    def __init__(self):
        super().__init__()
        self.mean = [tf.Variable(tf.zeros(4), trainable=False)]

    def call(self, x):
        out = x - self.mean[0]
        self.mean[0].assign(0.9 * self.mean[0] + 0.1 * keras.ops.mean(x, 0))
        return out


def test_state_behind_kerass_back_is_refused():
    for backend in ("auto", "vectorized", "loop"):
        with pytest.raises(keras_dp.IncompatibleModelError, match="writes a tf.Variable"):
            _train(RawState(), backend=backend)


class MetricState(L.Layer):
    """Keeps a mean of the data in a metric, and reads it."""

    def __init__(self):
        super().__init__()
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x):
        out = x - self.seen.result()
        self.seen.update_state(x)
        return out


def test_a_metric_that_a_layer_reads_stays_as_it_was():
    with pytest.warns(UserWarning, match="stay as they are"):
        model = _train(MetricState())
    assert float(model.layers[0].seen.result()) == 0
