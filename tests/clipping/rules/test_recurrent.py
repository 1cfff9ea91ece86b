"""LSTM, GRU, SimpleRNN and their wrappers: outputs of the plain layer, gradients of a loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp.clipping import example_loss, rules
from keras_dp.clipping.recording import Recorder
from keras_dp.clipping.rules.rule import Use
from tests.fixtures import checks, zoo

CELLS = {
    "lstm": L.LSTM,
    "gru": L.GRU,
    "gru_reset_before": lambda *args, **kwargs: L.GRU(*args, reset_after=False, **kwargs),
    "simple_rnn": L.SimpleRNN,
}
OPTIONS = {
    "plain": {},
    "backwards": dict(go_backwards=True),
    "sequences": dict(return_sequences=True),
    "backward_sequences": dict(go_backwards=True, return_sequences=True),
    "state": dict(return_state=True),
    "sequences_and_state": dict(return_sequences=True, return_state=True),
    "unroll": dict(unroll=True),
    "unroll_backwards": dict(unroll=True, go_backwards=True, return_sequences=True),
    "no_bias": dict(use_bias=False),
    "activation": dict(activation=lambda x: keras.ops.softplus(x) - 0.3),
    "no_activation": dict(activation=None),
    "zero_output": dict(zero_output_for_mask=True, return_sequences=True),
    "zero_last_output": dict(zero_output_for_mask=True),
    "zero_last_output_backwards": dict(zero_output_for_mask=True, go_backwards=True),
}
ONLY_GATED = {
    "implementation": dict(implementation=1),
    "recurrent_activation": dict(recurrent_activation="hard_sigmoid"),
    "activation_over_units": dict(recurrent_activation="softmax", activation="softmax"),
}
CASES = [(cell, name) for cell in CELLS for name in OPTIONS] + [
    (cell, name) for cell in CELLS if cell != "simple_rnn" for name in ONLY_GATED
]
# The options that bear on gradients, and whether they are tried with a mask.
MASKED_GRADIENTS = {
    "plain": False,
    "backwards": True,
    "backward_sequences": False,
    "state": True,
    "unroll_backwards": True,
    "no_bias": False,
    "activation": False,
    "zero_output": True,
    "zero_last_output_backwards": True,
    "implementation": False,
    "recurrent_activation": True,
    "activation_over_units": False,
}
DROPOUTS = {
    "inputs": dict(dropout=0.4),
    "states": dict(recurrent_dropout=0.4),
    "both": dict(dropout=0.3, recurrent_dropout=0.4, return_sequences=True),
    "by_gate": dict(dropout=0.4, implementation=1, use_cudnn=False),
}
DROPOUT_CASES = [
    (cell, name)
    for cell in CELLS
    for name in DROPOUTS
    if (cell, name) != ("simple_rnn", "by_gate")  # it has no gates
]
STEPS = 5

# Rows: nothing masked, the end, the beginning, the middle and both ends, everything.
MASK = np.array(
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]], bool
)


def _options(name):
    return (OPTIONS | ONLY_GATED | DROPOUTS)[name]


def _layer(cell, name):
    return CELLS[cell](3, bias_initializer="random_normal", **_options(name))


def _data(seed=0, features=2):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(len(MASK), STEPS, features)).astype("float32")


def _states(layer, seed=1):
    rng = np.random.default_rng(seed)
    count = len(layer.state_size)
    return [tf.constant(rng.normal(size=(len(MASK), 3)), tf.float32) for _ in range(count)]


def _recorded(layer, *args, **kwargs):
    rule = rules.rule_for(layer)
    use = Use(layer, layer.trainable_variables, rule, args, kwargs)

    def watch(tensor):
        use.outputs.append(tensor)
        return tensor

    return rule.record(use, layer.call, watch)


def _assert_same(got, want):
    for a, b in zip(tf.nest.flatten(got), tf.nest.flatten(want), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


# Outputs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, MASK], ids=["unmasked", "masked"])
@pytest.mark.parametrize("cell, name", CASES)
def test_outputs_are_those_of_the_layer(cell, name, mask):
    layer, x = _layer(cell, name), tf.constant(_data())
    layer.build(x.shape)
    for state in (None, _states(layer)):
        kwargs = dict(mask=mask if mask is None else tf.constant(mask), initial_state=state)
        _assert_same(_recorded(layer, x, **kwargs), layer.call(x, **kwargs))


@pytest.mark.parametrize("training", [True, False, None])
@pytest.mark.parametrize("cell, name", DROPOUT_CASES)
def test_dropout_draws_what_keras_draws(cell, name, training):
    layer, x = _layer(cell, name), tf.constant(_data())
    layer.build(x.shape)
    generator = layer.cell.seed_generator.state
    start = tf.identity(generator.value)
    want = layer.call(x, training=training)
    after = tf.identity(generator.value)
    generator.assign(start)
    _assert_same(_recorded(layer, x, training=training), want)
    np.testing.assert_array_equal(generator.value, after)
    without = layer.call(x, training=False)
    differs = np.any(np.abs(want - without) > 1e-3)
    assert differs == bool(training)


@pytest.mark.parametrize("cell", CELLS)
def test_half_precision(cell):
    layer = CELLS[cell](3, dtype="mixed_float16", return_state=True)
    x = tf.constant(_data(), tf.float16)
    layer.build(x.shape)
    got, want = _recorded(layer, x), layer(x)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, atol=2e-3)


# Gradients ---------------------------------------------------------------------------------


def _model(*layers, masked=False):
    """Tokens or vectors through ``layers`` to three logits that see every output."""
    if masked:
        inputs = keras.Input((STEPS,), dtype="int32")
        x = L.Embedding(zoo.VOCABULARY, 2, mask_zero=True)(inputs)
    else:
        x = inputs = keras.Input((STEPS, 2))
    for layer in layers:
        x = layer(x)
    x = [L.Flatten()(o) for o in keras.tree.flatten(x)]
    x = x[0] if len(x) == 1 else L.Concatenate()(x)
    model = keras.Model(inputs, L.Dense(zoo.CLASSES)(x))
    rng = np.random.default_rng(2)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.1 * rng.normal(size=variable.shape))
    return model


def _batch(masked=False):
    y = np.array([0, 1, 2, 0, 1], "int32")
    if masked:
        x = np.random.default_rng(0).integers(1, zoo.VOCABULARY, MASK.shape).astype("int32")
        return np.where(MASK, x, 0), y
    return _data(), y


def _check_loop(model, x, y, **kwargs):
    norms, _ = checks.plain_loop(model, x, y, 1.0)
    optimizer = keras_dp.DPSGD(
        1.0,
        l2_norm_clip=float(np.median(norms)),
        noise_multiplier=0.0,
        batch_size=1,
        backend="layerwise",
    )
    checks.check_loop(model, optimizer, x, y, **kwargs)


@pytest.mark.parametrize("cell, name", [case for case in CASES if case[1] in MASKED_GRADIENTS])
def test_gradients_are_those_of_a_loop(cell, name):
    masked = MASKED_GRADIENTS[name]
    _check_loop(_model(_layer(cell, name), masked=masked), *_batch(masked))


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("cell", CELLS)
def test_initial_states_get_gradients(cell, backwards):
    """States that a layer before has made, with a mask that starts late."""
    inputs = keras.Input((STEPS,), dtype="int32")
    x = L.Embedding(zoo.VOCABULARY, 2, mask_zero=True)(inputs)
    start = L.Dense(3, activation="tanh")(L.Flatten()(x))
    states = [start, 2 * start] if cell == "lstm" else [start]
    layer = CELLS[cell](3, return_sequences=True, go_backwards=backwards)
    # Keras hands on a mask by itself only to a layer called on one tensor.
    outputs = L.Flatten()(layer(x, initial_state=states, mask=keras.ops.not_equal(inputs, 0)))
    _check_loop(keras.Model(inputs, L.Dense(zoo.CLASSES)(outputs)), *_batch(masked=True))


@pytest.mark.parametrize("cell", ["lstm", "gru_reset_before"])
def test_any_number_of_steps(cell):
    """The time axis is open."""
    inputs = keras.Input((None, 2))
    x = L.Bidirectional(CELLS[cell](3, return_sequences=True))(inputs)
    x = L.TimeDistributed(L.Dense(4, activation="tanh"))(x)
    model = keras.Model(inputs, L.Dense(zoo.CLASSES)(L.GlobalAveragePooling1D()(x)))
    x, y = _batch()
    norms, want = checks.plain_loop(model, x, y, 1.0)
    optimizer = keras_dp.DPSGD(
        1.0,
        l2_norm_clip=float(np.median(norms)),
        noise_multiplier=0.0,
        batch_size=1,
        backend="layerwise",
    )
    _, want = checks.plain_loop(model, x, y, optimizer.l2_norm_clip)
    model.compile(optimizer, loss=checks._crossentropy())
    signature = [tf.TensorSpec([None, None, 2]), tf.TensorSpec([None], tf.int32)]

    @tf.function(input_signature=signature)
    def run(x, y):
        return keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums

    checks.assert_sums_close(run(x, y), want)


@pytest.mark.parametrize("frozen", ["kernel", "recurrent_kernel", "bias"])
@pytest.mark.parametrize("cell", CELLS)
def test_frozen_weights(cell, frozen):
    layer = _layer(cell, "plain")
    model = _model(layer)
    getattr(layer.cell, frozen).trainable = False
    assert len(model.trainable_variables) == 4
    _check_loop(model, *_batch())


@pytest.mark.parametrize("cell, name", DROPOUT_CASES)
def test_gradients_with_dropout(cell, name):
    """Against the Jacobian of one pass with the same masks."""
    layer = _layer(cell, name)
    model = _model(layer)
    x, y = _batch()
    generator = layer.cell.seed_generator.state
    start = tf.identity(generator.value)
    with tf.GradientTape(persistent=True) as tape:
        losses = keras.losses.sparse_categorical_crossentropy(
            y, model(x, training=True), from_logits=True
        )
    values = [v.value for v in model.trainable_variables]
    jacobians = [
        tf.convert_to_tensor(j).numpy()
        for j in tape.jacobian(losses, values, experimental_use_pfor=False)
    ]
    norms = np.sqrt(sum(np.sum(j.reshape(len(x), -1) ** 2, 1) for j in jacobians))
    clip = float(np.median(norms))
    factors = np.minimum(1, clip / norms)
    generator.assign(start)
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=clip, noise_multiplier=0.0, batch_size=1, backend="layerwise"
    )
    model.compile(optimizer, loss=checks._crossentropy())
    got = tf.function(
        lambda: keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums, autograph=False
    )()
    checks.assert_sums_close(got, [np.tensordot(factors, j, 1) for j in jacobians])


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_a_layer_that_is_called_with_and_without_dropout(cell):
    """The uses join although only one of them drops an input for each gate."""
    layer = CELLS[cell](3, dropout=0.4, implementation=1, use_cudnn=False)
    model = _model(WithAndWithoutDropout(layer))
    x, y = _batch()
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=1e3, noise_multiplier=0.0, batch_size=1, backend="layerwise"
    )
    model.compile(optimizer, loss=checks._crossentropy())
    start = tf.identity(layer.cell.seed_generator.state.value)
    got = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums
    layer.cell.seed_generator.state.assign(start)
    with tf.GradientTape() as tape:
        loss = len(x) * checks._crossentropy()(y, model(x))
    want = tape.gradient(loss, [v.value for v in model.trainable_variables])
    checks.assert_sums_close(got, want)


class WithAndWithoutDropout(L.Layer):
    """The outputs of a layer in training and in inference, side by side."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        both = [self.layer(x, training=True), self.layer(x, training=False)]
        return keras.ops.concatenate(both, -1)


def test_uses_of_a_shared_layer_join():
    shared = L.LSTM(3, return_sequences=True)
    inputs = keras.Input((STEPS, 3))
    x = L.Flatten()(shared(shared(inputs)))
    _check_loop(keras.Model(inputs, L.Dense(zoo.CLASSES)(x)), _data(features=3), _batch()[1])


def test_activity_regularizers():
    """That of the layer, and Keras leaves out that of a layer inside TimeDistributed."""
    model = _model(
        L.GRU(3, return_sequences=True, activity_regularizer="l2"),
        L.TimeDistributed(L.Dense(2, activity_regularizer="l1"), activity_regularizer="l1"),
        L.TimeDistributed(keras.Sequential([L.Dense(2, activity_regularizer="l2")])),
    )
    x, y = _batch()

    def loss(y, p, sample_weight=None):
        return checks._crossentropy()(y, p) + sum(model.losses)

    norms, _ = checks.plain_loop(model, x, y, 1.0, loss=loss)
    clip = float(np.median(norms))
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=clip, noise_multiplier=0.0, batch_size=1, backend="layerwise"
    )
    model.compile(optimizer, loss=checks._crossentropy())
    got = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums
    checks.assert_sums_close(got, checks.plain_loop(model, x, y, clip, loss=loss)[1])


def test_activity_of_folded_rows_belongs_to_its_example():
    rows = tf.constant([[1.0, -2.0], [3.0, 0.0], [4.0, 5.0], [0.0, 6.0]])
    regularized = [(keras.regularizers.L1(1.0), rows, 2)]
    losses, ((start, gradient),) = example_loss.activity_losses(regularized, 10.0)
    np.testing.assert_allclose(losses, [6, 15])
    assert start is rows
    np.testing.assert_allclose(gradient, 10 * np.sign(rows))


def test_what_keras_unrolls_in_another_order_goes_through_the_fallback():
    options = dict(unroll=True, go_backwards=True, zero_output_for_mask=True)
    layer = L.LSTM(3, return_sequences=True, **options)
    assert rules.rule_for(layer) is None
    _check_loop(_model(layer, masked=True), *_batch(True))


# What has no rule --------------------------------------------------------------------------


class OwnLSTM(L.LSTM):
    """Halves what an LSTM returns: the rule of an LSTM does not hold."""

    def call(self, sequences, initial_state=None, mask=None, training=False):
        return 0.5 * super().call(sequences, initial_state, mask, training)


class OwnCell(L.Layer):
    """h = tanh((x + h) W)."""

    state_size = output_size = 3

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3))
        self.v = self.add_weight(shape=(3, 3))

    def call(self, inputs, states):
        h = keras.ops.tanh(inputs @ self.w + states[0] @ self.v)
        return h, [h]


def _with_trained_activation():
    slope = L.PReLU(alpha_initializer="ones")
    slope.build((None, 3))
    return L.SimpleRNN(3, activation=slope)


FALLBACK = {
    "subclass": lambda: OwnLSTM(3),
    "cell": lambda: L.RNN(OwnCell()),
    "states": lambda: L.RNN(OwnCell(), return_sequences=True, return_state=True),
    "stacked": lambda: L.RNN([L.LSTMCell(3), L.GRUCell(2)], return_sequences=True),
    "trained_activation": _with_trained_activation,
}


@pytest.mark.parametrize("name", FALLBACK)
def test_the_fallback_runs_these_as_a_whole(name):
    layer = FALLBACK[name]()
    assert rules.rule_for(layer) is None
    _check_loop(_model(layer), *_batch())


@pytest.mark.parametrize("name", ["subclass", "cell"])
def test_both_directions_without_a_rule(name):
    with keras.saving.custom_object_scope({"OwnCell": OwnCell, "OwnLSTM": OwnLSTM}):
        _check_loop(_model(L.Bidirectional(FALLBACK[name]())), *_batch())


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolutional_lstm(rank):
    layer = getattr(L, f"ConvLSTM{rank}D")(2, 2, return_sequences=True)
    shape = (2, *[3] * rank, 1)
    model = keras.Sequential(
        [keras.Input(shape), layer, L.Flatten(), L.Dense(zoo.CLASSES)],
    )
    x = np.random.default_rng(0).normal(size=(4, *shape)).astype("float32")
    _check_loop(model, x, np.array([0, 1, 2, 0], "int32"))


@pytest.mark.parametrize("cell", [L.LSTMCell, L.GRUCell, L.SimpleRNNCell])
def test_a_cell_by_itself(cell):
    """Its output is one of its states, and an LSTM's output is computed from the other one."""
    cell = cell(3)
    inputs = keras.Input((STEPS, 2))
    first = L.Dense(3, activation="tanh")(inputs[:, 0])
    state = [first] if isinstance(cell.state_size, int) else [first, first]
    seen = []
    for k in range(2):
        output, state = cell(inputs[:, k], state)
        seen += [output, *state]
    _check_loop(keras.Model(inputs, L.Dense(zoo.CLASSES)(L.Concatenate()(seen))), *_batch())


def test_a_layer_as_activation_keeps_its_weights_gradients():
    """A rule does not hold for a layer with more weights than it answers for."""
    slope = L.PReLU(alpha_initializer="ones")
    slope.build((None, 4))
    model = keras.Sequential([keras.Input((4,)), L.Dense(4, activation=slope), L.Dense(3)])
    x, y = zoo.batch(model)
    assert len(model.trainable_variables) == 5
    _check_loop(model, x, y)


# Wrappers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True], ids=["unmasked", "masked"])
@pytest.mark.parametrize("merge", ["concat", "sum", "mul", "ave", None])
def test_bidirectional(merge, masked):
    layer = L.Bidirectional(
        L.LSTM(3, return_sequences=True),
        merge_mode=merge,
        backward_layer=L.LSTM(3, return_sequences=True, go_backwards=True, use_bias=False),
    )
    model = _model(layer, masked=masked)
    recorder = Recorder(model, model.trainable_variables)
    assert layer not in [unit.layer for unit in recorder.units]
    _check_loop(model, *_batch(masked))


WRAPPED = {
    "dense": ((), lambda: L.Dense(3, activation="tanh")),
    "convolution": ((4, 2), lambda: L.Conv1D(3, 2, activation="tanh")),
    "nested": ((3, 2), lambda: L.TimeDistributed(L.Dense(3, activation="tanh"))),
    "model": (
        (4, 2),
        lambda: keras.Sequential([L.Conv1D(3, 2, activation="tanh"), L.LSTM(2), L.Dense(2)]),
    ),
    "no_rule": ((3, 2), zoo.Position),
    "own_weights_and_layers": ((3, 2), zoo.ScaledDense),
    "recurrent": ((4, 2), lambda: L.GRU(3, go_backwards=True)),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_time_distributed(name):
    shape, make = WRAPPED[name]
    shape = (STEPS, *(shape or (2,)))
    model = keras.Sequential(
        [keras.Input(shape), L.TimeDistributed(make()), L.Flatten(), L.Dense(zoo.CLASSES)]
    )
    x = np.random.default_rng(0).normal(size=(4, *shape)).astype("float32")
    model(x)  # builds what Keras cannot build from shapes
    _check_loop(model, x, np.array([0, 1, 2, 0], "int32"))


def test_time_distributed_calls_its_layer_once():
    inner = L.Dense(3)
    inputs = keras.Input((STEPS, 4, 2))
    outputs = L.TimeDistributed(L.TimeDistributed(inner))(inputs)
    model = keras.Model(inputs, outputs)
    recorder = Recorder(model, model.trainable_variables)
    with tf.GradientTape() as tape, recorder.recording(tape):
        got = model(np.ones((3, STEPS, 4, 2), "float32"))
    (use,) = recorder.uses
    assert use.rows_per_example == STEPS * 4
    assert use.outputs[0].shape == (3 * STEPS * 4, 3)
    np.testing.assert_allclose(got, model(np.ones((3, STEPS, 4, 2), "float32")), rtol=1e-6)


class WithoutDropout(L.Layer):
    """Calls a layer in inference."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, x):
        return self.layer(x, training=False)


def test_time_distributed_hands_on_masks_and_the_training_flag():
    """A mask [batch, time, positions] reaches an inner layer as [batch * time, positions]."""
    inputs = keras.Input((3, STEPS), dtype="int32")
    x = L.Embedding(zoo.VOCABULARY, 2, mask_zero=True)(inputs)
    x = L.TimeDistributed(L.LSTM(3))(x)
    x = WithoutDropout(L.TimeDistributed(L.Dropout(0.999)))(x)
    model = keras.Model(inputs, L.Dense(zoo.CLASSES)(L.Flatten()(x)))
    x, y = _batch(masked=True)
    _check_loop(model, np.stack([x, x[::-1], np.roll(x, 1, 0)], 1), y)


def test_time_distributed_dropout_has_one_mask_for_each_step():
    model = keras.Sequential(
        [keras.Input((STEPS, 6)), L.TimeDistributed(L.Dropout(0.5)), L.Dense(3)]
    )
    recorder = Recorder(model, model.trainable_variables)
    with tf.GradientTape() as tape, recorder.recording(tape):
        model(np.ones((20, STEPS, 6), "float32"), training=True)
    (use,) = recorder.uses
    dropped = np.asarray(use.input == 0).reshape(20 * STEPS, 6)
    assert 0.4 < dropped.mean() < 0.6
    assert len(np.unique(dropped, axis=0)) > 30  # of 64
