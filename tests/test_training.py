"""The private step in Keras: logs equal to plain Keras's, every kind of data, no way past it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from packaging import version

import keras_dp
from keras_dp import training
from tests.fixtures import checks, zoo

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# Before 3.14, Keras adds up activity regularizers over the batch instead of averaging them.
# Here an example's is that of a batch of one, in every version.
AVERAGES_ACTIVITY = version.parse(keras.__version__) >= version.parse("3.14")
ACTIVITY = keras.regularizers.L2(0.1) if AVERAGES_ACTIVITY else None


def _optimizer(**kwargs):
    args = dict(l2_norm_clip=1e30, noise_multiplier=0.0, batch_size=8) | kwargs
    return keras_dp.DPSGD(0.1, **args)


def _two_outputs():
    a, b = keras.Input((4,), name="a"), keras.Input((3,), name="b")
    hidden = L.Dense(6, activation="tanh")(L.Concatenate()([a, b]))
    return keras.Model(
        {"a": a, "b": b},
        {"kind": L.Dense(3, name="kind")(hidden), "size": L.Dense(1, name="size")(hidden)},
    )


def _two_output_data(rng):
    x = {"a": rng.normal(size=(8, 4)), "b": rng.normal(size=(8, 3))}
    y = {"kind": rng.integers(0, 3, 8), "size": rng.normal(size=(8, 1))}
    return {k: v.astype("float32") for k, v in x.items()}, y


def _masked():
    return keras.Sequential(
        [keras.Input((6,), dtype="int32"), L.Embedding(7, 4, mask_zero=True), L.Dense(7)]
    )


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, 2 * y_pred, sample_weight)


def _own_loss():
    inputs = keras.Input((4,))
    return OwnLoss(inputs, L.Dense(3)(inputs))


def _dense():
    return zoo.build("dense")


def _data(rng):
    return rng.normal(size=(8, 4)).astype("float32"), rng.integers(0, 3, 8)


def _masked_data(rng):
    x = rng.integers(0, 3, (8, 6)).astype("int32")
    x[:, 0] = 1
    return x, x


SIMPLE = dict(loss=CROSSENTROPY, metrics=["accuracy"])
CASES = {
    "simple": (_dense, _data, SIMPLE, {}),
    "sample_weight": (
        _dense,
        _data,
        SIMPLE | dict(weighted_metrics=["accuracy"]),
        dict(sample_weight=np.float32([1, 2, 0, 3, 0.5, 1, 1, 0])),
    ),
    "class_weight": (
        _dense,
        _data,
        SIMPLE | dict(weighted_metrics=["accuracy"]),
        dict(class_weight={0: 1.0, 1: 3.0, 2: 0.2}),
    ),
    "two_outputs": (
        _two_outputs,
        _two_output_data,
        dict(
            loss={"kind": CROSSENTROPY, "size": "mse"},
            loss_weights={"kind": 0.3, "size": 2.0},
            metrics={"kind": ["accuracy"], "size": ["mae"]},
        ),
        {},
    ),
    "weights_per_output": (
        _two_outputs,
        _two_output_data,
        dict(loss={"kind": CROSSENTROPY, "size": "mse"}, weighted_metrics={"size": ["mae"]}),
        dict(
            sample_weight={
                "kind": np.float32([1, 2, 0, 3, 0.5, 1, 1, 0]),
                "size": np.float32([1, 0, 1, 3, 0.5, 1, 1, 2]),
            }
        ),
    ),
    "own_compute_loss": (_own_loss, _data, SIMPLE, {}),
    "regularized": (
        lambda: keras.Sequential(
            [
                keras.Input((4,)),
                L.Dense(5, kernel_regularizer="l2", activity_regularizer=ACTIVITY),
                L.Dense(3),
            ]
        ),
        _data,
        SIMPLE,
        {},
    ),
    "masked": (_masked, _masked_data, SIMPLE, {}),
}


@pytest.mark.parametrize(
    "variant", [{}, {"microbatch_size": 3}, {"backend": "vectorized"}], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_logs_and_update_equal_plain_keras(case, variant):
    """Without noise and clip, the logs are Keras's and so are the weights after an update."""
    make, data, compile_args, fit_args = CASES[case]
    x, y = data(np.random.default_rng(0))
    results = []
    for optimizer in (keras.optimizers.SGD(0.1), _optimizer(**variant)):
        keras.utils.set_random_seed(3)
        model = make()
        model.compile(optimizer, **compile_args)
        history = model.fit(
            x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, **fit_args
        ).history
        results.append((history, model.get_weights()))
    (plain_logs, plain_weights), (logs, weights) = results
    assert logs.keys() == plain_logs.keys()
    # A mask makes Keras's batch mean differ from the mean of the examples' means, so that
    # only what was logged before the first update agrees.
    epochs = 1 if case == "masked" else 2
    for name, values in plain_logs.items():
        np.testing.assert_allclose(
            logs[name][:epochs], values[:epochs], rtol=2e-5, atol=1e-6, err_msg=name
        )
    if case != "masked":
        for a, b in zip(plain_weights, weights):
            np.testing.assert_allclose(a, b, atol=2e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("microbatch_size", [None, 4])
def test_padding_counts_in_no_log(microbatch_size, jit_compile):
    model = _dense()
    x, y = zoo.batch(model, 10)
    logs = []
    for size in (10, 6):
        keras.utils.set_random_seed(3)
        model = _dense()
        model.compile(
            _optimizer(microbatch_size=microbatch_size), jit_compile=jit_compile, **SIMPLE
        )
        weight = np.where(np.arange(10) < 6, np.float32(1), np.float32(-0.0))
        padded = np.where(np.arange(10)[:, None] < 6, x, 1e20).astype("float32")
        args = (padded, y, weight) if size == 10 else (x[:6], y[:6])
        logs.append(model.train_on_batch(*args, return_dict=True))
    for name in logs[0]:
        np.testing.assert_allclose(logs[0][name], logs[1][name], rtol=1e-5)


def test_data_without_targets():
    """A sampler without y: the model's own loss of its inputs."""

    class Reconstruct(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            assert y is None
            return keras.ops.mean(keras.ops.square(y_pred - x))

    inputs = keras.Input((4,))
    model = Reconstruct(inputs, L.Dense(4)(inputs))
    model.compile(_optimizer(l2_norm_clip=1.0))
    x, _ = zoo.batch(_dense(), 40)
    logs = model.fit(keras_dp.PoissonSampler(x, batch_size=8), verbose=0).history
    assert int(model.optimizer.iterations) == 5
    assert np.isfinite(logs["loss"][0])


@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_empty_draw_is_an_update(jit_compile):
    """All padding: the weights move by noise, the step counts, nothing in the logs is NaN."""
    model = _dense()
    model.compile(
        _optimizer(noise_multiplier=1.0, l2_norm_clip=1.0), jit_compile=jit_compile, **SIMPLE
    )
    before = model.get_weights()
    x, y = zoo.batch(model, 6)
    logs = model.train_on_batch(x, y, np.full(6, -0.0, "float32"), return_dict=True)
    assert int(model.optimizer.iterations) == 1
    assert all(np.all(a != b) for a, b in zip(before, model.get_weights()))
    assert all(np.isfinite(v) for v in logs.values())


def test_rows_held_out_for_validation_train_nothing():
    """validation_split: updates, weights and logs depend on the first rows alone."""
    x, y = zoo.batch(_dense(), 16)
    other = x.copy()
    other[12:] = 5.0
    trained = []
    for data in (x, other):
        model = _dense()
        model.compile(_optimizer(batch_size=4), loss=CROSSENTROPY)
        args = dict(batch_size=4, validation_split=0.25, verbose=0, shuffle=False)
        logs = model.fit(data, y, **args).history
        assert int(model.optimizer.iterations) == 3
        trained.append((model.get_weights(), logs))
    for a, b in zip(trained[0][0], trained[1][0]):
        np.testing.assert_array_equal(a, b)
    assert trained[0][1]["loss"] == trained[1][1]["loss"]
    assert trained[0][1]["val_loss"] != trained[1][1]["val_loss"]


def test_steps_per_execution_counts_every_step():
    for steps in (1, 16):
        model = _dense()
        model.compile(_optimizer(), loss=CROSSENTROPY, steps_per_execution=steps)
        x, y = zoo.batch(model, 64 * 2)
        model.fit(x, y, batch_size=2, verbose=0)
        assert int(model.optimizer.iterations) == 64


def test_one_trace_for_full_and_partial_batches():
    """A last partial batch and a new epoch trace nothing anew once both shapes were seen."""
    traces = []

    class Traced(keras.Model):
        def call(self, x):
            traces.append(1)
            return self.dense(x)

        def __init__(self):
            super().__init__()
            self.dense = L.Dense(3)

    model = Traced()
    model.compile(_optimizer(), loss=CROSSENTROPY)
    x, y = zoo.batch(_dense(), 10)
    model.fit(x, y, batch_size=4, verbose=0, epochs=2)
    seen = len(traces)
    model.fit(x, y, batch_size=4, verbose=0, epochs=3)
    assert len(traces) == seen


# Fails closed ------------------------------------------------------------------------------


def test_plain_gradients_are_refused_every_time():
    """Also right after a legitimate step, which must leave no door open (TFP issue 134)."""
    model = _dense()
    optimizer = _optimizer()
    model.compile(optimizer, loss=CROSSENTROPY)
    x, y = zoo.batch(model)

    def plain():
        with tf.GradientTape() as tape:
            loss = CROSSENTROPY(y, model(x))
        variables = model.trainable_variables
        return tape.gradient(loss, [v.value for v in variables]), variables

    for _ in range(2):
        before = model.get_weights()
        grads, variables = plain()
        with pytest.raises(keras_dp.UnclippedGradientsError, match="plain gradients"):
            optimizer.apply_gradients(zip(grads, variables))
        with pytest.raises(keras_dp.UnclippedGradientsError):
            optimizer.apply(grads, variables)
        for a, b in zip(before, model.get_weights()):
            np.testing.assert_array_equal(a, b)
        checks.train_on_batch(model, x, y)  # a private step, then once more


def test_clipped_gradients_serve_once_and_their_own_optimizer():
    model = _dense()
    optimizer = _optimizer()
    model.compile(optimizer, loss=CROSSENTROPY)
    x, y = zoo.batch(model)
    clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
    with pytest.raises(keras_dp.UnclippedGradientsError, match="clipped for"):
        _optimizer().apply_gradients(clipped)
    optimizer.apply_gradients(clipped)
    with pytest.raises(keras_dp.UnclippedGradientsError, match="applied before"):
        optimizer.apply_gradients(clipped)


def test_clipped_gradients_of_one_batch_cannot_be_applied_in_a_loop():
    """Marking them as used happens in Python, which a tf.function runs only once."""
    model = _dense()
    optimizer = _optimizer()
    model.compile(optimizer, loss=CROSSENTROPY)
    clipped = keras_dp.clipped_gradients(model, *zoo.batch(model), optimizer=optimizer)

    @tf.function
    def apply():
        optimizer.apply_gradients(clipped)

    with pytest.raises(keras_dp.UnclippedGradientsError, match="made outside the tf.function"):
        apply()
    assert int(optimizer.iterations) == 0


class OwnStep(keras.Model):
    """A train step that never calls super."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x))
        variables = self.trainable_variables
        grads = tape.gradient(loss, [v.value for v in variables])
        self.optimizer.apply_gradients(zip(grads, variables))
        return {"loss": loss}


class CallsSuper(OwnStep):
    def train_step(self, data):
        return keras.Model.train_step(self, data)


def test_own_train_step():
    x, y = zoo.batch(_dense())
    model = OwnStep()
    model.compile(_optimizer(), loss=CROSSENTROPY)
    with pytest.raises(keras_dp.UnclippedGradientsError, match="train_step"):
        model.fit(x, y, verbose=0)
    model = CallsSuper()
    model.compile(_optimizer(noise_multiplier=1e3, l2_norm_clip=1.0), loss=CROSSENTROPY)
    model.fit(x, y, verbose=0)
    assert np.std(model.get_weights()[0]) > 1


def _noisy():
    return _optimizer(noise_multiplier=1e4, l2_norm_clip=1.0)


def test_loaded_and_cloned_models_train_privately(tmp_path):
    model = _dense()
    model.compile(_noisy(), loss=CROSSENTROPY)
    x, y = zoo.batch(model)
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.noise_multiplier == 1e4
    assert int(loaded.optimizer.iterations) == 1
    clone = keras.models.clone_model(model)
    clone.compile(keras_dp.DPSGD.from_config(model.optimizer.get_config()), loss=CROSSENTROPY)
    for other in (loaded, clone):
        before = other.get_weights()
        other.fit(x, y, verbose=0)
        assert all(np.std(a - b) > 1 for a, b in zip(other.get_weights(), before) if a.size > 5)


def test_two_private_models_in_turn_share_nothing():
    """A GAN's way of training: two optimizers, each counted for itself."""
    first, second = _dense(), _dense()
    for model in (first, second):
        model.compile(_optimizer(l2_norm_clip=0.1), loss=CROSSENTROPY)
    x, y = zoo.batch(first)
    for step in range(3):
        checks.train_on_batch(first, x, y)
        if step:
            checks.train_on_batch(second, x, y)
    assert int(first.optimizer.iterations) == 3
    assert int(second.optimizer.iterations) == 2


def test_plain_optimizers_still_train_plainly():
    model = _dense()
    model.compile(keras.optimizers.SGD(0.1), loss=CROSSENTROPY)
    x, y = zoo.batch(model)
    with tf.GradientTape() as tape:
        loss = CROSSENTROPY(y, model(x))
    want = model.get_weights()[0] - 0.1 * tape.gradient(loss, model.trainable_variables[0].value)
    checks.train_on_batch(model, x, y)
    np.testing.assert_allclose(model.get_weights()[0], want, atol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_step_is_traced_once(monkeypatch, jit_compile):
    """Neither a partial batch nor a new epoch, a Poisson draw or a second fit traces it again."""
    traces = []
    step = training.private_train_step
    monkeypatch.setattr(
        training, "private_train_step", lambda *args: traces.append(1) or step(*args)
    )
    x, y = np.random.default_rng(0).normal(size=(10, 4)).astype("float32"), np.zeros(10, "int32")
    sampler = keras_dp.PoissonSampler(x, y, batch_size=4)
    for data, kwargs in (((x, y), {"batch_size": 4}), ((sampler,), {})):
        traces.clear()
        model = zoo.build("dense")
        optimizer = keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=4)
        model.compile(optimizer, loss="sparse_categorical_crossentropy", jit_compile=jit_compile)
        for _ in range(2):
            model.fit(*data, epochs=2, verbose=0, **kwargs)
        assert len(traces) == 1
