"""clipped_gradients: backends, refusals, weights, randomness, and what stays untouched."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp import _keras
from tests.fixtures import checks, zoo

CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _optimizer(**kwargs):
    args = dict(l2_norm_clip=0.5, noise_multiplier=0.0, batch_size=1) | kwargs
    return keras_dp.DPSGD(1.0, **args)


def _sums(model, x, y, weight=None, loss=CROSSENTROPY, **kwargs):
    model.compile(_optimizer(**kwargs), loss=loss)

    @tf.function
    def run(x, y, weight):
        return keras_dp.clipped_gradients(model, x, y, weight, optimizer=model.optimizer).sums

    return [s.numpy() for s in run(x, y, weight)]


def _oracle_with_added_losses(model, x, y):
    """The clipped sums of a loop over examples, whatever the model adds to the loss included."""

    def loss(y, p, sample_weight=None):
        return CROSSENTROPY(y, p) + sum(model.losses)

    return checks.plain_loop(model, x, y, 0.5, loss=loss)[1]


def _dense_model(**kwargs):
    return keras.Sequential(
        [keras.Input((4,)), L.Dense(5, activation="tanh", **kwargs), L.Dense(3)]
    )


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("name", zoo.FEW)
def test_microbatches_change_nothing(name, microbatch_size):
    model = zoo.build(name)
    x, y = zoo.batch(model)
    checks.assert_sums_close(
        _sums(model, x, y, microbatch_size=microbatch_size), _sums(model, x, y)
    )


def test_padding_ends_the_loop():
    """Only ceil(real / microbatch_size) passes run; a row of padding counts nowhere."""
    model = zoo.build("dense")
    x, y = zoo.batch(model, 4)
    padded_x = np.concatenate([x, np.full((6, 4), np.nan, "float32")])
    padded_y = np.concatenate([y, np.zeros(6, "int32")])
    weight = np.float32([1, 1, 1, 1] + [-0.0] * 6)
    for size in (None, 1, 3, 4):
        got = _sums(model, padded_x, padded_y, weight, microbatch_size=size)
        checks.assert_sums_close(got, _sums(model, x, y))


class IgnoresWeights(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred)


@pytest.mark.filterwarnings("ignore:keras_dp. model .* trains with backend")
@pytest.mark.parametrize("backend", ["auto", "layerwise", "vectorized", "loop"])
def test_padding_counts_nowhere_even_if_the_loss_ignores_weights(backend):
    inputs = keras.Input((4,))
    model = IgnoresWeights(inputs, L.Dense(3)(inputs))
    x, y = zoo.batch(model, 6)
    weight = np.float32([1, 1, 1, -0.0, -0.0, 0])
    got = _sums(model, x, y, weight, backend=backend)
    checks.assert_sums_close(got, checks.plain_loop(model, x[:3], y[:3], 0.5)[1])


def test_an_empty_batch_of_padding_sums_to_zero():
    model = zoo.build("dense")
    x, y = zoo.batch(model, 4)
    for size in (None, 2):
        sums = _sums(model, x, y, np.full(4, -0.0, "float32"), microbatch_size=size)
        assert all(np.all(s == 0) for s in sums)


@pytest.mark.parametrize("backend", ["layerwise", "vectorized", "loop"])
def test_sample_weights(backend):
    model = zoo.build("dense")
    x, y = zoo.batch(model)
    weight = np.float32([0.1, 1, 20, 0, 3])
    _, want = checks.plain_loop(model, x, y, 0.5, sample_weight=weight)
    checks.assert_sums_close(_sums(model, x, y, weight, backend=backend), want)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "mean", None])
@pytest.mark.parametrize("backend", ["layerwise", "vectorized", "loop"])
def test_no_reduction_to_get_wrong(reduction, backend):
    """Whatever the loss does with a batch, an example's loss is that of a batch of one."""
    model = zoo.build("dense")
    x, y = zoo.batch(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    checks.assert_sums_close(
        _sums(model, x, y, loss=loss, backend=backend),
        checks.plain_loop(model, x, y, 0.5)[1],
    )


def test_plain_function_and_sequence_losses():
    """A function that gives a scalar, and outputs [batch, time, vocabulary]."""
    inputs = keras.Input((6,), dtype="int32")
    model = keras.Model(inputs, L.Dense(7)(L.Embedding(7, 4)(inputs)))
    x = np.random.default_rng(0).integers(0, 7, (5, 6)).astype("int32")

    def scalar(y, p):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True))

    want = checks.plain_loop(model, x, x, 0.05)[1]
    for loss in (CROSSENTROPY, scalar):
        checks.assert_sums_close(_sums(model, x, x, loss=loss, l2_norm_clip=0.05), want)


def test_masked_outputs():
    """A mask reaches the loss of each example."""
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), L.Embedding(7, 4, mask_zero=True), L.Dense(7)]
    )
    x = np.random.default_rng(0).integers(0, 3, (5, 6)).astype("int32")
    x[0, 1:] = 0
    want = checks.plain_loop(model, x, x, 0.05)[1]
    for backend in ("layerwise", "vectorized", "loop"):
        got = _sums(model, x, x, l2_norm_clip=0.05, backend=backend)
        checks.assert_sums_close(got, want)


def test_a_loss_of_ones_own():
    model = zoo.build("dense")
    x, y = zoo.batch(model)
    optimizer = _optimizer()
    clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer, loss=CROSSENTROPY)
    checks.assert_sums_close(clipped.sums, checks.plain_loop(model, x, y, 0.5)[1])
    np.testing.assert_allclose(clipped.loss, CROSSENTROPY(y, model(x)), rtol=1e-5)
    assert int(clipped.num_examples) == 5


def test_strings_and_integers_pass_through():
    lookup = L.StringLookup(vocabulary=["a", "b", "c"])
    text, number = keras.Input((3,), dtype="string"), keras.Input((), dtype="int32")
    embedded = L.Flatten()(L.Embedding(4, 2)(lookup(text)))
    row = L.Embedding(7, 2)(number)
    model = keras.Model([text, number], L.Dense(3)(L.Concatenate()([embedded, row])))
    x = [tf.constant([["a", "b", "z"], ["c", "c", "a"]]), tf.constant([3, 6])]
    y = np.int32([0, 2])
    # No trial run can make up strings, so the layerwise backend has to be asked for.
    checks.assert_sums_close(
        _sums(model, x, y, l2_norm_clip=0.05, backend="layerwise"),
        checks.plain_loop(model, x, y, 0.05)[1],
    )


# Losses that depend on weights or activations ---------------------------------------------


def test_weight_regularizers_stay_outside_the_clip():
    """x = 0 and no noise: w moves by -lr 2 l w, more than the clip would let it."""
    for backend in ("layerwise", "vectorized", "loop"):
        model = keras.Sequential(
            [
                keras.Input((2,)),
                L.Dense(
                    1,
                    use_bias=False,
                    kernel_initializer="ones",
                    kernel_regularizer=keras.regularizers.L2(0.3),
                ),
            ]
        )
        model.compile(_optimizer(backend=backend, l2_norm_clip=1e-3), loss=lambda y, p: y * p)
        checks.fit(model, np.zeros((2, 2), "float32"), np.ones((2, 1), "float32"))
        np.testing.assert_allclose(model.get_weights()[0].ravel(), 1 - 2 * 0.3, rtol=1e-6)


def test_activity_regularizers_go_through_the_clip():
    model = _dense_model(activity_regularizer=keras.regularizers.L2(0.7))
    x, y = zoo.batch(model)

    want = _oracle_with_added_losses(model, x, y)
    for backend in ("layerwise", "vectorized", "loop"):
        checks.assert_sums_close(_sums(model, x, y, backend=backend), want)


@keras.saving.register_keras_serializable("keras_dp_tests")
class AddsLoss(L.Layer):
    def call(self, x):
        self.add_loss(keras.ops.mean(keras.ops.square(x)))
        return x


def test_added_losses_go_through_the_clip():
    model = keras.Sequential([keras.Input((4,)), L.Dense(5), AddsLoss(), L.Dense(3)])
    x, y = zoo.batch(model)

    want = _oracle_with_added_losses(model, x, y)
    with pytest.warns(UserWarning, match="add_loss"):
        checks.assert_sums_close(_sums(model, x, y), want)
    checks.assert_sums_close(_sums(model, x, y, backend="loop"), want)
    with pytest.raises(keras_dp.IncompatibleModelError, match="add_loss"):
        _sums(model, x, y, backend="layerwise")


class ReadsWeights(keras.Model):
    """A loss that multiplies data by a weight, outside every layer's call."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight)
        return loss + keras.ops.mean(keras.ops.square(keras.ops.matmul(x, self.dense.kernel)))


def test_compute_loss_that_reads_weights():
    model = ReadsWeights()
    model.build((None, 4))
    x, y = np.random.default_rng(0).normal(size=(5, 4)).astype("float32"), np.int32([0, 1, 2, 0, 1])
    norms, total = [], 0
    for i in range(5):
        with tf.GradientTape() as tape:
            p = model(x[i : i + 1])
            value = CROSSENTROPY(y[i : i + 1], p) + tf.reduce_mean(
                tf.square(tf.matmul(x[i : i + 1], model.dense.kernel.value))
            )
        g = tape.gradient(value, [v.value for v in model.trainable_variables])
        norms.append(float(tf.linalg.global_norm(g)))
        total = [t + min(1, 0.5 / norms[-1]) * a.numpy() for t, a in zip(total or [0, 0], g)]
    with pytest.warns(UserWarning, match="read outside the call"):
        checks.assert_sums_close(_sums(model, x, y), total)
    with pytest.raises(keras_dp.IncompatibleModelError, match="kernel"):
        _sums(model, x, y, backend="layerwise")


# Refusals ----------------------------------------------------------------------------------


def test_layerwise_names_what_it_cannot_see():
    model = zoo.build("tied")
    with pytest.raises(keras_dp.IncompatibleModelError, match="kernel.*read outside"):
        _sums(model, *zoo.batch(model), backend="layerwise")


def test_vectorized_refuses_grouped_convolutions():
    model = zoo.build("conv2d_groups")
    with pytest.raises(keras_dp.IncompatibleModelError, match="grouped.*backend='loop'"):
        _sums(model, *zoo.batch(model), backend="vectorized")


def test_training_batch_normalization_is_refused_before_the_first_step():
    model = keras.Sequential([keras.Input((4,)), L.Dense(5), L.BatchNormalization(), L.Dense(3)])
    before = model.get_weights()
    model.compile(_optimizer(), loss=CROSSENTROPY)
    with pytest.raises(keras_dp.IncompatibleModelError, match=r"batch_normalization.*\n?.*fix"):
        model.fit(*zoo.batch(model), verbose=0)
    for a, b in zip(before, model.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_optimizer_must_be_private():
    model = zoo.build("dense")
    with pytest.raises(ValueError, match="DP optimizer.*Received: SGD"):
        keras_dp.clipped_gradients(model, *zoo.batch(model), optimizer=keras.optimizers.SGD())


# Randomness and state ----------------------------------------------------------------------


class Masks(L.Layer):
    """Multiplies by a trained one, after dropout: its clipped sum shows the masks."""

    def build(self, shape):
        self.weight = self.add_weight(shape=(shape[-1],), initializer="zeros")

    def call(self, x):
        return x + self.weight


@pytest.mark.parametrize("backend", ["layerwise", "vectorized", "loop"])
def test_each_example_has_its_own_mask(backend):
    """Predictions are rows of masks; they differ between examples and between steps."""
    model = keras.Sequential([keras.Input((64,)), L.Dropout(0.5), Masks()])
    model.compile(_optimizer(backend=backend), loss="mse")
    seen = []

    def observe(result, *rest):
        seen.append(result.y_pred)

    from keras_dp.clipping import gradients

    x = tf.ones((4, 64))
    for _ in range(2):
        gradients.accumulate(model, x, x, None, optimizer=model.optimizer, observe=observe)
    masks = np.concatenate([np.asarray(s) for s in seen]) > 0
    assert len(masks) == 8
    assert len({m.tobytes() for m in masks}) == 8
    assert 0.4 < masks.mean() < 0.6


@keras.saving.register_keras_serializable("keras_dp_tests")
class Counts(L.Layer):
    """Writes a statistic of the batch into a variable of its own."""

    def build(self, shape):
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, name="total")

    def call(self, x):
        self.total.assign_add(keras.ops.sum(x))
        return x


def test_state_that_depends_on_data_stays_as_it_was():
    model = keras.Sequential([keras.Input((4,)), Counts(), L.Dense(3)])
    x, y = zoo.batch(model)
    with pytest.warns(UserWarning, match="total.*stay as they are"):
        _sums(model, x, y)
    assert float(model.layers[0].total) == 0


def test_layers_are_as_before_after_an_exception():
    model = _dense_model(activity_regularizer=keras.regularizers.L2(0.7))
    x, _ = zoo.batch(model)

    def broken(y, p):
        raise RuntimeError("a loss that fails")

    with pytest.raises(RuntimeError, match="a loss that fails"):
        keras_dp.clipped_gradients(model, x, np.zeros(5), optimizer=_optimizer(), loss=broken)
    for layer in _keras.all_layers(model):
        assert "call" not in layer.__dict__
    dense = model.layers[0]
    assert dense.activation is keras.activations.tanh
    assert isinstance(dense.activity_regularizer, keras.regularizers.L2)


def test_frozen_layers_are_left_out():
    """Only the trained weights are in the norm; nothing is kept of the others."""
    model = zoo.build("frozen")
    x, y = zoo.batch(model)
    before = [v.numpy() for v in model.non_trainable_variables]
    norms, _ = checks.plain_loop(model, x, y, 1.0)
    model.compile(_optimizer(l2_norm_clip=float(np.median(norms)), batch_size=5), loss=CROSSENTROPY)
    for _ in range(3):
        checks.fit(model, x, y)
    for a, b in zip(before, model.non_trainable_variables):
        np.testing.assert_array_equal(a, b)


def test_repeated_ids_add_before_the_norm():
    """Ids [2, 2, 2] in one example: norm 3 |g|, not sqrt(3) |g|."""
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), L.Embedding(5, 2, embeddings_initializer="zeros")]
    )

    def loss(y, p):
        return keras.ops.sum(p * keras.ops.convert_to_tensor([0.6, 0.8]))

    clipped = keras_dp.clipped_gradients(
        model,
        np.int32([[2, 2, 2]]),
        np.zeros((1, 1)),
        optimizer=_optimizer(l2_norm_clip=1.5),
        loss=loss,
    )
    np.testing.assert_allclose(clipped.sums[0][2], [0.9, 1.2], rtol=1e-5)


def test_no_table_for_every_example():
    """An embedding of 100,000 rows, 64 examples: nothing in the graph is larger than the table."""
    model = keras.Sequential(
        [keras.Input((8,), dtype="int32"), L.Embedding(100_000, 64), L.Flatten(), L.Dense(3)]
    )
    model.compile(_optimizer(), loss=CROSSENTROPY)

    @tf.function(input_signature=[tf.TensorSpec([64, 8], tf.int32), tf.TensorSpec([64], tf.int32)])
    def run(x, y):
        return keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer).sums

    graph = run.get_concrete_function().graph
    shapes = [o.shape for op in graph.get_operations() for o in op.outputs]
    sizes = [s.num_elements() for s in shapes if s.rank is not None and s.is_fully_defined()]
    assert max(sizes) == 100_000 * 64


def test_negative_ids_count_from_the_end():
    """As in Keras: the clipped sum goes to the row that was read."""
    model = keras.Sequential([keras.Input((2,), dtype="int32"), L.Embedding(5, 2)])
    x, y = np.int32([[-1, 1], [4, -5]]), np.zeros((2, 2, 2), "float32")
    want = checks.plain_loop(model, x, y, 0.01, loss=keras.losses.MeanSquaredError())[1]
    checks.assert_sums_close(_sums(model, x, y, loss="mse", l2_norm_clip=0.01), want)


# Rows that are not the examples -------------------------------------------------------------


@keras.saving.register_keras_serializable("keras_dp_tests")
class Folded(L.Layer):
    """Calls a dense layer on [batch x time, features]: its rows are not the examples."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(3)

    def build(self, shape):
        self.dense.build((None, shape[-1]))

    def call(self, x):
        rows = self.dense(keras.ops.reshape(x, (-1, x.shape[-1])))
        return keras.ops.reshape(rows, (-1, x.shape[1], 3))


@keras.saving.register_keras_serializable("keras_dp_tests")
class TimeMajor(Folded):
    """Calls a dense layer on [time, batch, features]."""

    def call(self, x):
        rows = self.dense(keras.ops.transpose(x, (1, 0, 2)))
        return keras.ops.transpose(rows, (1, 0, 2))


@keras.saving.register_keras_serializable("keras_dp_tests")
class Reversed(Folded):
    """Calls a dense layer on the batch in reverse order."""

    def call(self, x):
        return keras.ops.flip(self.dense(keras.ops.flip(x, 0)), 0)


@pytest.mark.parametrize("layer", [Folded, TimeMajor, Reversed])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("static", [False, True])
def test_rows_that_are_not_the_examples(layer, size, static):
    """A norm per row would clip the wrong thing, also when time is as long as the batch."""
    model = keras.Sequential([keras.Input((4, 5)), layer(), L.GlobalAveragePooling1D()])
    x = np.random.default_rng(0).normal(size=(size, 4, 5)).astype("float32")
    y = np.zeros(size, "int32")
    want = checks.plain_loop(model, x, y, 0.3)[1]
    model.compile(_optimizer(l2_norm_clip=0.3), loss=CROSSENTROPY)

    def run(x, y):
        return keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer).sums

    rows = size if static else None
    signature = [tf.TensorSpec([rows, 4, 5]), tf.TensorSpec([rows], tf.int32)]
    with pytest.warns(UserWarning, match="backend='vectorized'"):
        got = tf.function(run, input_signature=signature)(x, y)
    checks.assert_sums_close(got, want)
    with pytest.raises(keras_dp.IncompatibleModelError, match="rows|examples"):
        _sums(model, x, y, backend="layerwise")


@keras.saving.register_keras_serializable("keras_dp_tests")
class WritesWeight(L.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        self.scale.assign(self.scale * 1.0 + keras.ops.sum(x))
        return x * self.scale


def test_a_forward_pass_that_writes_a_trained_weight_is_refused():
    model = keras.Sequential([keras.Input((4,)), WritesWeight(), L.Dense(3)])
    with pytest.raises(
        keras_dp.IncompatibleModelError, match="writes the trained weights|influence"
    ):
        _sums(model, *zoo.batch(model))


def test_an_activity_regularizer_inside_a_layer_without_a_rule():
    layer = zoo.ScaledDense()
    layer.dense.activity_regularizer = keras.regularizers.L2(0.7)
    model = keras.Sequential([keras.Input((4,)), layer, L.Dense(3)])
    x, y = zoo.batch(model)

    want = _oracle_with_added_losses(model, x, y)
    with pytest.warns(UserWarning, match="activity regularizer inside"):
        checks.assert_sums_close(_sums(model, x, y), want)


class Keeps(L.Layer):
    """Leaves its output where a loss may read it."""

    def call(self, x):
        self.kept = x
        return x * 1.0


def test_a_loss_that_reads_activations():
    """It would read those of the whole batch: examples are trained one by one."""
    keeps = Keeps()
    model = keras.Sequential([keras.Input((4,)), L.Dense(3), keeps, L.Dense(3)])
    x, y = zoo.batch(model)

    def loss(y, p):
        return CROSSENTROPY(y, p) + 10 * keras.ops.mean(keeps.kept)

    with pytest.warns(UserWarning, match="vectorized.*the loss reads more of the model"):
        got = _sums(model, x, y, loss=loss)
    one_by_one = checks.plain_loop(model, x, y, 0.5, loss=lambda y, p, sample_weight: loss(y, p))
    checks.assert_sums_close(got, one_by_one[1])
    with pytest.raises(keras_dp.IncompatibleModelError, match="reads more of the model"):
        _sums(model, x, y, loss=loss, backend="layerwise")


CONTROL_FLOW = {
    "cond": lambda z: tf.cond(z[0, 0] > 0, lambda: tf.reduce_sum(z**2), lambda: tf.reduce_sum(z)),
    "while": lambda z: tf.while_loop(
        lambda k, _: k < 3, lambda k, s: (k + 1, s * tf.reduce_sum(z)), (0, tf.constant(1.0))
    )[1],
    "map": lambda z: tf.reduce_sum(tf.map_fn(lambda v: v**3, z[0])),
}


@pytest.mark.parametrize("name", CONTROL_FLOW)
def test_losses_with_control_flow(name):
    def loss(y, p, sample_weight=None):
        return CONTROL_FLOW[name](p)

    model = _dense_model()
    x, y = zoo.batch(model)
    want = checks.plain_loop(model, x, y, 0.5, loss=loss)[1]
    checks.assert_sums_close(_sums(model, x, y, loss=loss), want)


class Remembers(L.Layer):
    """Keeps the data in a table."""

    def __init__(self):
        super().__init__()
        self.memory = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, -1.0)

    def call(self, x):
        self.memory.insert(tf.constant([0], tf.int64), tf.reduce_mean(x)[None])
        return x


@pytest.mark.parametrize("backend", ["layerwise", "vectorized"])
def test_a_forward_pass_that_writes_a_table_is_refused(backend):
    model = keras.Sequential([keras.Input((4,)), Remembers(), L.Dense(3)])
    x, y = zoo.batch(model)
    with pytest.raises(keras_dp.IncompatibleModelError, match="LookupTableInsert"):
        _sums(model, x, y, backend=backend)


def test_an_activation_put_in_place_after_a_step_is_looked_at():
    model = _dense_model()
    x, y = (tf.constant(t) for t in zoo.batch(model))
    model.compile(_optimizer(), loss=CROSSENTROPY)
    keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer)
    model.layers[0].activation = lambda z: z - tf.reduce_mean(z, 0)
    with pytest.raises(keras_dp.IncompatibleModelError, match="influence each other"):
        keras_dp.clipped_gradients(model, x, y, optimizer=model.optimizer)


@pytest.mark.parametrize("microbatch_size", [None, 1])
def test_one_row_of_a_batch_of_unknown_size(microbatch_size):
    """The last of a data set, or a replica's share; here for layers whose outputs are added."""
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(3)(inputs) + keras.layers.Dense(3)(inputs)
    model = keras.Model(inputs, outputs)
    x, y = zoo.batch(model, size=1)

    def sums(backend):
        optimizer = keras_dp.DPSGD(
            1.0,
            l2_norm_clip=0.5,
            noise_multiplier=0.0,
            batch_size=1,
            backend=backend,
            microbatch_size=microbatch_size,
        )
        model.compile(optimizer, loss="sparse_categorical_crossentropy")

        @tf.function(input_signature=[tf.TensorSpec([None, *a.shape[1:]], a.dtype) for a in (x, y)])
        def run(x, y):
            return keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums

        return run(x, y)

    checks.assert_sums_close(sums("vectorized"), sums("layerwise"))
