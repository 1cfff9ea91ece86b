"""Units of several rows: augmented copies, and users. One gradient, clipped once."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from tests.fixtures import checks, zoo

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BACKENDS = ["layerwise", "vectorized", "loop"]
NONE = np.float32(-0.0)


def _sgd(**kwargs):
    args = dict(l2_norm_clip=0.5, noise_multiplier=0.0, batch_size=1) | kwargs
    return keras_dp.DPSGD(1.0, **args)


def _clipped(model, optimizer, x, y, weight=None, jit_compile=False, known=True):
    """The clipped sums, from a function that is traced for a batch of known or unknown size."""
    model.compile(optimizer, loss=CROSSENTROPY)
    arrays = [np.asarray(a) for a in (x, y) + (() if weight is None else (weight,))]
    size = len(y) if known else None
    signature = [tf.TensorSpec([size, *a.shape[1:]], a.dtype) for a in arrays]

    @tf.function(input_signature=signature, jit_compile=jit_compile)
    def run(*data):
        clipped = keras_dp.clipped_gradients(model, *data, optimizer=optimizer)
        return clipped.sums, clipped.loss, clipped.num_examples

    return run(*arrays)


USERS = [[0, 1, 2], [3], [], [6, 8]]  # rows of four users with room for three each


def _users(model):
    """Rows of four users, with something that is no example in the place of missing rows."""
    x, y = zoo.batch(model, 12)
    weight = np.full(12, NONE)
    weight[[row for user in USERS for row in user]] = 1
    return x, y, weight


def _expected(model, clip, users=USERS):
    x, y, _ = _users(model)
    users = [u for u in users if u]
    return checks.plain_loop(model, x, y, clip, units=users)


@pytest.mark.parametrize(
    "args, jit_compile, known",
    [
        ({}, False, True),
        ({"backend": "layerwise"}, False, False),
        ({"backend": "layerwise"}, True, True),
        ({"backend": "layerwise", "microbatch_size": 3}, False, True),
        ({"backend": "vectorized"}, False, False),
        ({"backend": "vectorized", "microbatch_size": 2}, False, True),
        pytest.param({"backend": "vectorized"}, True, True, marks=pytest.mark.slow),
        ({"backend": "loop"}, False, True),
        pytest.param({"backend": "loop"}, True, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["dense", pytest.param("scaled_dense", marks=pytest.mark.slow)])
def test_users_equal_a_loop(name, args, jit_compile, known):
    """Each user's gradient is the mean over the rows that are there, clipped once."""
    model = zoo.build(name)
    norms, _ = _expected(model, 1.0)
    clip = float(np.median(norms))
    _, want = _expected(model, clip)
    sums, _, number = _clipped(
        model,
        _sgd(l2_norm_clip=clip, examples_per_user=3, **args),
        *_users(model),
        jit_compile=jit_compile,
        known=known,
    )
    checks.assert_sums_close(sums, want)
    assert int(number) == 6


@pytest.mark.parametrize(
    "backend, broken", [("layerwise", np.nan), ("layerwise", np.inf), ("vectorized", np.nan)]
)
def test_what_stands_in_a_missing_row_does_not_matter(backend, broken):
    """Not even if the model makes NaN of it: the user's other rows count as ever."""
    model = zoo.build("dense")
    x, y, weight = _users(model)
    x[np.signbit(weight)] = broken
    _, want = _expected(model, 0.5)
    sums, loss, _ = _clipped(model, _sgd(examples_per_user=3, backend=backend), x, y, weight)
    checks.assert_sums_close(sums, want)
    assert np.isfinite(loss)


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_broken_row_takes_its_user_out(backend):
    model = zoo.build("dense")
    x, y, weight = _users(model)
    x[1] = np.nan
    _, want = _expected(model, 0.5, users=USERS[1:])
    sums, *_ = _clipped(model, _sgd(examples_per_user=3, backend=backend), x, y, weight)
    checks.assert_sums_close(sums, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_of_weight_zero_is_an_example(backend):
    """It counts in the mean over its user's rows, with a loss of zero."""
    model = zoo.build("dense")
    x, y, weight = _users(model)
    weight[1] = 0.0
    gradients = keras_dp.testing.per_example_gradients(model, x, y, CROSSENTROPY)
    users = [[gradients[0], gradients[2]], [gradients[3]], [gradients[6], gradients[8]]]
    want = [np.zeros(v.shape) for v in model.trainable_variables]
    for user, rows in zip(users, (3, 1, 2)):
        mean = [sum(g) / rows for g in zip(*user)]
        norm = np.sqrt(sum(np.sum(np.square(g)) for g in mean))
        want = [w + g * min(1, 0.5 / norm) for w, g in zip(want, mean)]
    sums, _, number = _clipped(model, _sgd(examples_per_user=3, backend=backend), x, y, weight)
    checks.assert_sums_close(sums, want)
    assert int(number) == 6


def test_users_without_missing_rows_need_no_weights():
    model = zoo.build("dense")
    x, y = zoo.batch(model, 6)
    _, want = checks.plain_loop(model, x, y, 0.5, units=[[0, 1], [2, 3], [4, 5]])
    sums, *_ = _clipped(model, _sgd(examples_per_user=2), x, y)
    checks.assert_sums_close(sums, want)


@pytest.mark.parametrize("known", [True, False])
def test_half_a_user_is_refused(known):
    model = zoo.build("dense")
    x, y = zoo.batch(model, 5)
    with pytest.raises((ValueError, tf.errors.InvalidArgumentError), match="a multiple of"):
        _clipped(model, _sgd(examples_per_user=2), x, y, known=known)


def test_half_a_user_is_refused_in_fit():
    model = zoo.build("dense")
    model.compile(_sgd(examples_per_user=2), loss=CROSSENTROPY)
    x, y = zoo.batch(model, 9)
    with pytest.raises(tf.errors.InvalidArgumentError, match="a multiple of 2 rows"):
        model.fit(x, y, batch_size=6, verbose=0)


def test_per_example_and_per_user_logs():
    """The logs are those of all rows that are there, by fit as by plain Keras."""
    model = zoo.build("dense")
    x, y, weight = _users(model)
    there = ~np.signbit(weight)
    losses = [float(CROSSENTROPY(y[k : k + 1], model(x[k : k + 1]))) for k in np.flatnonzero(there)]
    right = np.mean(np.argmax(model.predict(x, verbose=0), 1)[there] == y[there])
    for args in ({}, {"microbatch_size": 2, "augmentations": 2}):
        optimizer = keras_dp.DPSGD(
            0.0,
            l2_norm_clip=1.0,
            noise_multiplier=0.0,
            batch_size=3,
            examples_per_user=3,
            **args,
        )
        model.compile(optimizer, loss=CROSSENTROPY, metrics=["accuracy"])
        logs = model.train_on_batch(x, y, sample_weight=weight, return_dict=True)
        assert logs["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert logs["accuracy"] == pytest.approx(right)


# Augmented copies --------------------------------------------------------------------------


def _noisy():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            L.GaussianNoise(0.5, seed=3),
            L.Dense(5, activation="tanh"),
            L.Dropout(0.3, seed=4),
            L.Dense(3),
        ]
    )


@pytest.mark.parametrize(
    "args, jit_compile",
    [
        ({"backend": "layerwise"}, False),
        pytest.param({"backend": "layerwise"}, True, marks=pytest.mark.slow),
        ({"backend": "layerwise", "microbatch_size": 2}, False),
        pytest.param({"backend": "vectorized"}, False, marks=pytest.mark.slow),
        pytest.param({"backend": "loop"}, False, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_copies_are_rows_of_one_unit(args, jit_compile):
    """K copies of an example are what K equal rows of a user would be; each draws by itself."""
    x, y = zoo.batch(zoo.build("dense"), 4)
    seen = []
    for option, data in (
        ({"augmentations": 3}, (x, y)),
        ({"examples_per_user": 3}, (np.repeat(x, 3, 0), np.repeat(y, 3))),
        ({"augmentations": 1}, (x, y)),
    ):
        optimizer = _sgd(**option, **args)
        sums, _, _ = _clipped(_noisy(), optimizer, *data, jit_compile=jit_compile)
        seen.append(np.concatenate([np.ravel(s) for s in sums]))
    np.testing.assert_allclose(seen[0], seen[1], atol=1e-6)
    assert np.max(np.abs(seen[0] - seen[2])) > 1e-3


@pytest.mark.parametrize(
    "backend", [BACKENDS[0], *(pytest.param(b, marks=pytest.mark.slow) for b in BACKENDS[1:])]
)
def test_the_mean_over_copies_has_less_noise(backend):
    """Gaussian noise on the inputs: its part of the gradient has 1 / K of the variance."""
    spread = {}
    for copies in (None, 16):
        model = keras.Sequential(
            [keras.Input((500,)), L.GaussianNoise(1.0), L.Dense(1, use_bias=False)]
        )
        optimizer = _sgd(l2_norm_clip=1e6, augmentations=copies, backend=backend)
        model.compile(optimizer, loss=lambda y, p: y * p)
        x, y = np.full((2, 500), 3, "float32"), np.ones((2, 1), "float32")
        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
        gradient = np.ravel(clipped.sums[0]) / 2
        assert np.mean(gradient) == pytest.approx(3, abs=0.2)
        assert int(clipped.num_examples) == 2
        spread[copies] = np.std(gradient)
    assert spread[None] / spread[16] == pytest.approx(4, rel=0.15)


def test_copies_and_users_together():
    """k rows, K copies of each, one gradient: with nothing random, that of the k rows."""
    model = zoo.build("conv2d")
    x, y, weight = _users(model)
    _, want = _expected(model, 0.5)
    for args in ({"backend": "vectorized"}, {"microbatch_size": 3}):
        optimizer = _sgd(examples_per_user=3, augmentations=2, **args)
        sums, _, number = _clipped(model, optimizer, x, y, weight)
        checks.assert_sums_close(sums, want)
        assert int(number) == 6


def test_float16_copies_keep_small_gradients():
    """The share of a copy is small; scaling of the loss makes up for it."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential(
            [keras.Input((4,)), L.Dense(3, use_bias=False), L.Activation("linear")]
        )
    finally:
        keras.config.set_dtype_policy("float32")
    x, y = np.ones((1, 4), "float32"), np.full((1, 3), 2e-5, "float32")
    optimizer = _sgd(augmentations=64, l2_norm_clip=1.0)
    model.compile(optimizer, loss=lambda y, p: y * keras.ops.cast(p, "float32"))
    clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
    # The compiled loss is a mean over the three outputs.
    np.testing.assert_allclose(clipped.sums[0], np.full((4, 3), 2e-5 / 3), rtol=5e-3)


def test_activity_regularizers_are_averaged_too():
    """Rows that a layer is called on fold time steps as well as copies."""
    inner = L.Dense(3, activity_regularizer=keras.regularizers.L2(0.1))
    model = keras.Sequential(
        [keras.Input((2, 4)), L.TimeDistributed(inner), L.Flatten(), L.Dense(3)]
    )
    x, y = zoo.batch(model, 6)
    seen = []
    for backend in ("layerwise", "vectorized"):
        optimizer = _sgd(examples_per_user=2, augmentations=2, backend=backend, l2_norm_clip=0.2)
        sums, loss, _ = _clipped(model, optimizer, x, y)
        seen.append((sums, loss))
    checks.assert_sums_close(seen[0][0], [np.asarray(s) for s in seen[1][0]])
    assert float(seen[0][1]) == pytest.approx(float(seen[1][1]), rel=1e-5)


def test_a_compute_loss_of_ones_own():
    class Own(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return super().compute_loss(x, y, 2 * y_pred, sample_weight)

    inputs = keras.Input((4,))
    model = Own(inputs, L.Dense(3)(inputs))
    x, y = zoo.batch(zoo.build("dense"), 6)
    seen = []
    for backend in ("layerwise", "loop"):
        sums, *_ = _clipped(model, _sgd(examples_per_user=2, backend=backend), x, y)
        seen.append([np.asarray(s) for s in sums])
    checks.assert_sums_close(*seen)
