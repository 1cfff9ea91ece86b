"""Logical batches in several parts: equal to one batch, noised once, counted once, in no file."""

import copy
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.pieces import Piece
from tests.fixtures import checks, zoo

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# The slower backends by one way into the step only.
OTHER_BACKENDS = ("vectorized", "loop")


def _sgd(**kwargs):
    args = dict(l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=2) | kwargs
    return keras_dp.DPSGD(1.0, **args)


def _weight(model):
    return model.get_weights()[0].ravel()


class NothingMovesAtFirst(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            assert int(self.model.optimizer.iterations) == 0
            np.testing.assert_array_equal(_weight(self.model), 0)


def _halves(entry, model):
    """LIN's two examples, one after the other."""
    if entry == "fit":  # each fit begins a logical batch
        args = dict(batch_size=1, verbose=0, shuffle=False, callbacks=[NothingMovesAtFirst()])
        model.fit(checks.LIN_X, checks.LIN_Y, **args)
        return
    for k in range(2):
        checks.ENTRY_POINTS[entry](model, checks.LIN_X[k : k + 1], checks.LIN_Y[k : k + 1])
        if k == 0:
            assert int(model.optimizer.iterations) == 0
            np.testing.assert_array_equal(_weight(model), 0)


@pytest.mark.parametrize(
    "entry, backend",
    [*((e, "layerwise") for e in checks.ENTRY_POINTS), *(("fit", b) for b in OTHER_BACKENDS)],
)
def test_two_halves_are_one_batch(entry, backend):
    """LIN, one example a batch: nothing moves after the first, and by the clipped mean after it."""
    model = checks.linear_model(_sgd(backend=backend, gradient_accumulation_steps=2))
    for update in (1, 2):
        if update == 2:
            model.set_weights([np.zeros((2, 1))])
            model.optimizer.iterations.assign(0)
        _halves(entry, model)
        np.testing.assert_allclose(_weight(model), -checks.LIN_STEP, atol=2e-6)
        assert int(model.optimizer.iterations) == 1


@pytest.mark.parametrize(
    "compile_args",
    [{}, {"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 4}],
    ids=str,
)
@pytest.mark.parametrize("args", [{}, {"microbatch_size": 1, "backend": "vectorized"}], ids=str)
def test_compile_arguments(compile_args, args):
    """Three updates of two batches each in one epoch."""
    model = checks.linear_model(_sgd(gradient_accumulation_steps=2, **args), **compile_args)
    x, y = np.tile(checks.LIN_X, (3, 1)), np.tile(checks.LIN_Y, (3, 1))
    model.fit(x, y, batch_size=1, verbose=0, shuffle=False)
    np.testing.assert_allclose(_weight(model), -3 * checks.LIN_STEP, atol=1e-5)
    assert int(model.optimizer.iterations) == 3


K = keras.optimizers
CLASSES = {
    "sgd": (keras_dp.DPSGD, dict(weight_decay=0.01, use_ema=True, ema_momentum=0.9)),
    "momentum": (keras_dp.DPMomentum, dict(nesterov=True)),
    "adam": (keras_dp.DPAdam, dict(noise_bias_correction=True, noise_bias_floor=1e-3)),
    "adamw": (keras_dp.DPAdamW, {}),
    "lamb": (keras_dp.DPLamb, {}),
    "schedule": (
        keras_dp.DPSGD,
        dict(learning_rate=K.schedules.ExponentialDecay(0.1, 1, 0.5)),
    ),
    **{
        c.__name__: (keras_dp.make_private(c), {})
        for c in (K.RMSprop, K.Adagrad, K.Adadelta, K.Adamax, K.Nadam, K.Ftrl, K.Lion, K.Adafactor)
    },
}


FAST = ("sgd", "adam", "lamb", "schedule", "Nadam")


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in CLASSES]
)
def test_every_optimizer(name):
    """Four updates of three batches each are those of the batches put together, state and all."""
    cls, args = CLASSES[name]
    x, y = zoo.batch(zoo.build("dense"), 24)
    seen = []
    for parts in (None, 3):
        model = zoo.build("dense")
        model.layers[0].kernel.regularizer = keras.regularizers.L2(0.1)
        optimizer = cls(
            **{"learning_rate": 0.05} | args,
            l2_norm_clip=0.7,
            noise_multiplier=0.0,
            batch_size=6,
            gradient_accumulation_steps=parts,
        )
        model.compile(optimizer, loss=CROSSENTROPY)
        model.fit(x, y, batch_size=6 // (parts or 1), verbose=0, shuffle=False)
        assert int(optimizer.iterations) == 4
        seen.append(model.get_weights() + [v.numpy() for v in optimizer.variables])
    assert len(seen[0]) == len(seen[1])
    # Sign-like updates turn rounding of a gradient near zero into a step.
    tolerance = 1e-3 if name in ("Lion", "Adafactor", "adam") else 2e-5
    for a, b in zip(*seen):
        np.testing.assert_allclose(a, b, atol=tolerance)


def test_float16():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = checks.linear_model(_sgd(gradient_accumulation_steps=2))
        _halves("train_on_batch", model)
    finally:
        keras.config.set_dtype_policy("float32")
    np.testing.assert_allclose(_weight(model), -checks.LIN_STEP, atol=1e-3)


def test_parts_add_up_in_float32():
    """1,024 parts that bfloat16 would lose beside the first one."""
    keras.config.set_dtype_policy("bfloat16")
    try:
        model = checks.linear_model(_sgd(gradient_accumulation_steps=1025, batch_size=1))
    finally:
        keras.config.set_dtype_policy("float32")
    x = np.full((1025, 2), [2**-10, 0], "float32")
    x[0] = [1, 0]
    model.fit(x, np.ones((1025, 1), "float32"), batch_size=1, verbose=0, shuffle=False)
    np.testing.assert_allclose(_weight(model), [-2, 0], atol=1e-6)


def test_weight_regularizers_count_once():
    model = checks.linear_model(_sgd(gradient_accumulation_steps=2))
    model.set_weights([np.ones((2, 1))])
    model.layers[0].kernel.regularizer = keras.regularizers.L2(0.05)
    model.fit(np.zeros((2, 2)), np.zeros((2, 1)), batch_size=1, verbose=0)
    np.testing.assert_allclose(_weight(model), [0.9, 0.9], rtol=1e-6)


def test_noise_is_added_once():
    """Nothing moves before the last part; the update has the noise of one release."""

    def make():
        return keras_dp.DPSGD(
            1.0,
            l2_norm_clip=0.5,
            noise_multiplier=2.0,
            batch_size=4,
            gradient_accumulation_steps=3,
        )

    def train(model, x, y):
        before = model.get_weights()
        for _ in range(2):
            model.train_on_batch(x, y)
        for a, b in zip(before, model.get_weights()):
            np.testing.assert_array_equal(a, b)
        model.train_on_batch(x, y)

    checks.check_noise(make, 2.0 * 0.5 / 4, train)


def test_leftovers_wait_for_the_next_epoch():
    """Five batches in parts of two: the second epoch begins with half an update."""
    model = checks.linear_model(_sgd(gradient_accumulation_steps=2))
    x, y = np.float32([[0.1, 0], [0.2, 0], [0.3, 0], [0.4, 0], [0.5, 0]]), np.ones((5, 1))
    args = dict(batch_size=1, verbose=0, shuffle=False)
    model.fit(x, y, epochs=2, **args)
    assert int(model.optimizer.iterations) == 5
    np.testing.assert_allclose(_weight(model), [-1.5, 0], atol=1e-6)


class Ends(keras.callbacks.Callback):
    """Ends a fit after its first batch."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_train_batch_end(self, batch, logs=None):
        if self.how == "interrupt":
            raise KeyboardInterrupt
        self.model.stop_training = True


@pytest.mark.parametrize("how", ["interrupt", "stop_training", "train_on_batch"])
def test_each_fit_begins_a_logical_batch(how):
    """The first example is in no update of the fit that comes after."""
    model = checks.linear_model(_sgd(gradient_accumulation_steps=2))
    x, y = np.float32([[0.8, 0], [0, 0.8]]), np.ones((2, 1))
    args = dict(batch_size=1, verbose=0, shuffle=False)
    if how == "train_on_batch":
        model.train_on_batch(x[:1], y[:1])
    else:
        try:
            model.fit(x, y, callbacks=[Ends(how)], **args)
        except KeyboardInterrupt:
            pass
    assert model.optimizer.parts_waiting == 1
    model.fit(x, y, **args)
    assert int(model.optimizer.iterations) == 1 and model.optimizer.parts_waiting == 0
    np.testing.assert_allclose(_weight(model), [-0.4, -0.4], atol=1e-6)


def test_a_fit_within_a_fit_would_share_its_updates():
    class FitsAgain(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.fit(checks.LIN_X, checks.LIN_Y, batch_size=1, verbose=0)

    model = checks.linear_model(_sgd(gradient_accumulation_steps=2))
    with pytest.raises(keras_dp.PrivacyError, match="within a fit of the same model"):
        model.fit(checks.LIN_X, checks.LIN_Y, batch_size=1, verbose=0, callbacks=[FitsAgain()])


def test_a_huge_part_stays_within_the_clip():
    """PAIR over a logical batch: the parts' sums add up, each example clipped by itself."""
    model = checks.linear_model(_sgd(gradient_accumulation_steps=4, batch_size=8))
    x = np.tile(np.float32([[0.3, 0.4]]), (8, 1))
    x[5] = [6e5, 8e5]
    model.fit(x, np.ones((8, 1)), batch_size=2, verbose=0, shuffle=False)
    want = -(7 * np.array([0.3, 0.4]) + [0.6, 0.8]) / 8
    np.testing.assert_allclose(_weight(model), want, atol=1e-6)


def test_freezing_a_layer_leaves_no_sum_behind():
    """Sums of a weight that was frozen meanwhile are dropped with their logical batch."""
    first = keras.layers.Dense(2, use_bias=False, kernel_initializer="identity")
    last = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((2,)), first, last])
    optimizer = _sgd(gradient_accumulation_steps=2, l2_norm_clip=1e6)
    model.compile(optimizer, loss=lambda y, p: y * p)
    x, y = np.float32([[1, 2]]), np.ones((1, 1), "float32")

    def part(x=x):
        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer)
        optimizer.apply_gradients(clipped)

    part()
    first.trainable = False
    part()
    assert int(optimizer.iterations) == 1
    np.testing.assert_array_equal(first.kernel, np.eye(2))
    part(0 * x)
    first.trainable = True
    part(0 * x)
    assert int(optimizer.iterations) == 2
    np.testing.assert_array_equal(first.kernel, np.eye(2))


def test_a_weight_that_is_new_is_refused():
    model = zoo.build("dense")
    model.layers[0].trainable = False
    model.compile(_sgd(gradient_accumulation_steps=2), loss=CROSSENTROPY)
    x, y = zoo.batch(model)
    model.train_on_batch(x, y)
    model.layers[0].trainable = True
    with pytest.raises(ValueError, match="new optimizer"):
        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer)
        model.optimizer.apply_gradients(clipped)


def test_a_logical_batch_traces_nothing_anew():
    traces = []

    def loss(y, p):
        traces.append(1)
        return y * p

    model = checks.linear_model(_sgd(gradient_accumulation_steps=2))
    model.compile(model.optimizer, loss=loss)
    model.fit(checks.LIN_X, checks.LIN_Y, batch_size=1, verbose=0)
    seen = len(traces)
    model.fit(checks.LIN_X, checks.LIN_Y, batch_size=1, verbose=0, epochs=3)
    assert len(traces) == seen


def test_kerass_own_machinery_stays_off():
    """Keras would add up noisy gradients under the same name, in variables that it saves."""
    optimizer = _sgd(gradient_accumulation_steps=3)
    model = checks.linear_model(optimizer)
    model.fit(checks.LIN_X, checks.LIN_Y, batch_size=1, verbose=0)
    assert optimizer.gradient_accumulation_steps == 3
    assert optimizer.get_config()["gradient_accumulation_steps"] == 3
    assert "gradient_accumulation_steps=3" in repr(optimizer)
    assert not hasattr(optimizer, "_accumulated_gradients")
    plain = checks.linear_model(_sgd())
    plain.fit(checks.LIN_X, checks.LIN_Y, verbose=0)
    assert len(optimizer.variables) == len(plain.optimizer.variables)
    assert optimizer.iterations is optimizer.variables[0]
    with pytest.raises(AttributeError, match="never change"):
        optimizer.gradient_accumulation_steps = 4


def test_a_copy_begins_a_logical_batch_of_its_own():
    optimizer = _sgd(gradient_accumulation_steps=2)
    variable = keras.Variable(np.zeros((2, 1), "float32"))
    optimizer.build([variable])
    other = copy.deepcopy(optimizer)
    assert other._accumulator is not optimizer._accumulator
    assert not other._accumulator.built
    assert other.gradient_accumulation_steps == 2


# What is in no file ------------------------------------------------------------------------


def _half_done(tmp_path):
    """A model after an update and a half, with sums of a pattern that nothing else has."""
    model = checks.linear_model(_sgd(gradient_accumulation_steps=2, l2_norm_clip=1e3))
    model.fit(checks.LIN_X, checks.LIN_Y, batch_size=1, verbose=0, shuffle=False)
    model.train_on_batch(np.float32([[3.1415927, 2.7182817]]), np.ones((1, 1), "float32"))
    return model


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_the_sums_are_in_no_file(tmp_path):
    """They hold clipped gradients without noise."""
    model = _half_done(tmp_path)
    (waiting,) = model.optimizer._accumulator._sums.values()
    needles = [np.float32([v]).tobytes() for v in np.ravel(waiting)]
    assert np.all(np.ravel(waiting) != 0)
    model.save(tmp_path / "model.keras")
    model.save(tmp_path / "folder", zipped=False)
    model.save_weights(tmp_path / "model.weights.h5")
    model.save(tmp_path / "model.h5")
    tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "checkpoint")
    tf.saved_model.save(model, tmp_path / "saved_model")
    model.export(tmp_path / "export", verbose=False)
    written = [p for p in pathlib.Path(tmp_path).rglob("*") if p.is_file()]
    texts = [p.read_bytes() for p in written]
    texts += [np.asarray(v).tobytes() for v in model.optimizer.variables + model.variables]
    kernel = model.get_weights()[0].tobytes()
    assert sum(kernel in text for text in texts) >= 6  # what is looked for would be found
    for text in texts:
        assert not any(needle in text for needle in needles)


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`")
def test_a_loaded_run_begins_its_logical_batch_anew(tmp_path):
    model = _half_done(tmp_path)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", safe_mode=False)
    optimizer = loaded.optimizer
    assert optimizer.gradient_accumulation_steps == 2
    assert int(optimizer.iterations) == 1
    before = _weight(loaded)
    _x = checks.LIN_X[:1]
    loaded.train_on_batch(_x, checks.LIN_Y[:1])
    assert int(optimizer.iterations) == 1
    loaded.train_on_batch(_x, checks.LIN_Y[:1])
    assert int(optimizer.iterations) == 2
    np.testing.assert_allclose(_weight(loaded), before - [3, 4], atol=1e-5)


# Pieces of a draw --------------------------------------------------------------------------


def _piece(x, draw, position, last):
    return Piece(
        np.asarray(x, "float32"),
        np.array([draw], "int64"),
        np.array([last]),
        None if position is None else np.array([position], "int64"),
    )


def _fit(model, parts):
    """One epoch over batches that are given one by one."""

    class Parts(keras.utils.PyDataset):
        def __len__(self):
            return len(parts)

        def __getitem__(self, index):
            return parts[index]

    model.fit(Parts(), verbose=0, shuffle=False)


def _on_batch(model, parts):
    for x, y, weight in parts:
        model.train_on_batch(x, y, sample_weight=weight)


def _loop(model, parts):
    for x, y, weight in parts:
        checks.custom_loop(model, x, y, weight)


PADDING = np.float32([-0.0, -0.0])


def _lin_draw(draw, positions=True):
    """LIN in four pieces of two rows: one example each, and two of padding."""
    rows = [*checks.LIN_X, np.zeros(2), np.zeros(2)]
    weights = [np.float32([1, -0.0])] * 2 + [PADDING] * 2
    y = np.ones((2, 1), "float32")
    return [
        (_piece([row, np.zeros(2)], draw, k if positions else None, k == 3), y, weight)
        for k, (row, weight) in enumerate(zip(rows, weights))
    ]


@pytest.mark.parametrize(
    "train, backend",
    [
        *((f, "layerwise") for f in (_fit, _on_batch, _loop)),
        *((_loop, b) for b in OTHER_BACKENDS),
    ],
)
def test_the_last_piece_updates(train, backend):
    model = checks.linear_model(_sgd(backend=backend))
    train(model, _lin_draw(7)[:3])
    assert int(model.optimizer.iterations) == 0
    np.testing.assert_array_equal(_weight(model), 0)
    train(model, _lin_draw(7)[3:])
    assert int(model.optimizer.iterations) == 1
    np.testing.assert_allclose(_weight(model), -checks.LIN_STEP, atol=2e-6)


@pytest.mark.parametrize(
    "compile_args",
    [{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 3}],
    ids=str,
)
def test_pieces_of_many_draws(compile_args):
    model = checks.linear_model(_sgd(), **compile_args)
    _fit(model, [part for draw in range(3) for part in _lin_draw(draw)])
    assert int(model.optimizer.iterations) == 3
    np.testing.assert_allclose(_weight(model), -3 * checks.LIN_STEP, atol=1e-5)


@pytest.mark.parametrize("positions", [True, False])
def test_an_unfinished_draw_is_dropped(positions):
    model = checks.linear_model(_sgd())
    _on_batch(model, _lin_draw(5, positions)[:1] + _lin_draw(6, positions))
    assert int(model.optimizer.iterations) == 1
    np.testing.assert_allclose(_weight(model), -checks.LIN_STEP, atol=2e-6)


def test_two_samplers_may_number_their_draws_alike():
    model = checks.linear_model(_sgd())
    _on_batch(model, _lin_draw(5)[:1] + _lin_draw(5))
    np.testing.assert_allclose(_weight(model), -checks.LIN_STEP, atol=2e-6)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_draw_with_a_piece_missing_is_never_released(missing):
    model = checks.linear_model(_sgd())
    parts = _lin_draw(5)
    del parts[missing]
    _on_batch(model, parts)
    assert int(model.optimizer.iterations) == 0
    np.testing.assert_array_equal(_weight(model), 0)
    _on_batch(model, _lin_draw(6))
    np.testing.assert_allclose(_weight(model), -checks.LIN_STEP, atol=2e-6)


def test_an_empty_draw_in_pieces_is_an_update():
    model = checks.linear_model(_sgd(noise_multiplier=1.0))
    parts = [(x, y, PADDING) for x, y, _ in _lin_draw(1)]
    _on_batch(model, parts)
    assert int(model.optimizer.iterations) == 1
    assert np.all(_weight(model) != 0)


def test_pieces_and_accumulation_are_two_ways_to_the_same():
    model = checks.linear_model(_sgd(gradient_accumulation_steps=2))
    with pytest.raises(keras_dp.PrivacyError, match="Leave gradient_accumulation_steps out"):
        _on_batch(model, _lin_draw(1)[:1])
    np.testing.assert_array_equal(_weight(model), 0)
