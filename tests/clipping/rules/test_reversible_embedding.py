"""ReversibleEmbedding, both ways and tied: one variable, one norm, no table for an example."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp import testing
from keras_dp.clipping import forms, layerwise, rules
from tests.fixtures import checks, zoo


def _language_model(vocabulary=40, depth=12, time=5, **kwargs):
    inputs = keras.Input((time,), dtype="int32")
    table = L.ReversibleEmbedding(vocabulary, depth, **kwargs)
    hidden = L.Dense(depth, activation="tanh")(table(inputs))
    model = keras.Model(inputs, table(hidden, reverse=True))
    return model, table


def _data(vocabulary=40, time=5, size=5):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, (size, time)).astype("int32") for _ in range(2)]


def _randomize(model):
    rng = np.random.default_rng(1)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape))


@pytest.mark.filterwarnings("error:keras_dp")
@pytest.mark.parametrize(
    "kwargs",
    [{}, {"tie_weights": False}, {"logit_soft_cap": 1.5}, {"reverse_dtype": "float64"}],
    ids=str,
)
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("static, jit_compile", [(False, False), (True, True), (False, True)])
def test_language_model(kwargs, lora, static, jit_compile):
    """The ids and the logits use one table; so do both factors with LoRA."""
    model, table = _language_model(**kwargs)
    if lora:
        table.enable_lora(2)
    assert rules.rule_for(table) is not None
    _randomize(model)
    x, y = _data()
    norms, _ = checks.plain_loop(model, x, y, 1.0)
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=float(np.median(norms)), noise_multiplier=0.0, batch_size=5
    )
    checks.check_loop(model, optimizer, x, y, static, jit_compile)


@pytest.mark.parametrize("shape", [(12,), (5, 12)])
@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("tied", [True, False])
def test_reverse_alone(shape, cap, tied):
    layer = L.ReversibleEmbedding(40, 12, tie_weights=tied, logit_soft_cap=cap)
    layer.build()
    if not tied:
        layer._embeddings.trainable = False
    testing.check_rule(layer, shape, call_kwargs={"reverse": True})


def test_forward_alone():
    testing.check_rule(L.ReversibleEmbedding(40, 12), (5,), dtype="int32")


class SeveralUses(keras.Model):
    """Two uses of each kind, of different lengths."""

    def __init__(self):
        super().__init__()
        self.table = L.ReversibleEmbedding(40, 12)
        self.dense = L.Dense(12, activation="tanh")

    def call(self, x):
        hidden = self.dense(self.table(x))
        first = self.table(hidden, reverse=True)
        more = self.dense(self.table(x[:, :2]))
        return first[:, 0] + 2 * self.table(more[:, 0] - more[:, 1], reverse=True)


@pytest.mark.filterwarnings("error:keras_dp")
def test_several_uses_of_each_kind():
    model = SeveralUses()
    x, y = _data()
    model(x)
    _randomize(model)
    norms, _ = checks.plain_loop(model, x, y[:, 0], 1.0)
    for size in (None, 2):
        optimizer = keras_dp.DPSGD(
            1.0,
            l2_norm_clip=float(np.median(norms)),
            noise_multiplier=0.0,
            batch_size=5,
            microbatch_size=size,
        )
        checks.check_loop(model, optimizer, x, y[:, 0])
    found, _ = layerwise.weight_forms(
        model, checks._crossentropy(), model.trainable_variables, (x, y[:, 0], None)
    )
    assert isinstance(found[id(model.table._embeddings)], forms.Tied)


@pytest.mark.skipif(
    "compute_mask" not in vars(L.ReversibleEmbedding),
    reason="this Keras gives the logits a mask of the shape of the hidden states",
)
def test_masks_reach_the_loss():
    """Padded positions count in no loss, neither here nor in the loop."""
    model, _ = _language_model(mask_zero=True)
    _randomize(model)
    x, y = _data()
    x[0, 2:] = 0
    x[3] = 0
    norms, want = checks.plain_loop(model, x, y, 0.3)
    optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=0.3, noise_multiplier=0.0, batch_size=5)
    assert norms.max() > 0.3
    clipped = keras_dp.clipped_gradients(
        model, x, y, optimizer=optimizer, loss=checks._crossentropy()
    )
    checks.assert_sums_close(clipped.sums, want)


def test_no_table_for_every_example():
    """A vocabulary of 5,000, 16 examples: nothing in the graph is as large as 16 tables."""
    model, _ = _language_model(5000, 64, 8)
    optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=16)
    model.compile(optimizer, loss=checks._crossentropy())

    @tf.function
    def run(x, y):
        return keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums

    graph = run.get_concrete_function(*[tf.TensorSpec([16, 8], tf.int32)] * 2).graph
    branches = [f.graph for f in graph._functions.values() if hasattr(f, "graph")]
    sizes = [t.shape.num_elements() for g in (graph, *branches) for t in _needed(g)]
    assert max(size for size in sizes if size is not None) == 16 * 8 * 5000  # the logits


def _needed(graph):
    """The tensors that the results of a graph depend on: what a gradient tape makes in vain, and
    TensorFlow takes out again, is not among them."""
    seen, todo = set(), [t.op for t in graph.outputs]
    while todo:
        operation = todo.pop()
        if operation not in seen:
            seen.add(operation)
            todo += [t.op for t in operation.inputs] + list(operation.control_inputs)
    return [t for operation in seen for t in operation.outputs if t.shape.rank is not None]


def test_uses_that_cancel_stay_within_the_clip():
    """Reading a row and its logit pull in opposite directions, with huge norms."""
    inputs = keras.Input((1,), dtype="int32")
    table = L.ReversibleEmbedding(40, 12)
    scale = L.EinsumDense("abc,c->abc", output_shape=(1, 12), trainable=False)
    read = scale(table(inputs))
    logits = table(keras.ops.stop_gradient(read), reverse=True)
    model = keras.Model(inputs, [read, logits])
    rng = np.random.default_rng(0)
    for variable in model.variables:
        variable.assign(rng.normal(size=variable.shape))
    x = np.int32([[3], [5]])
    hidden = tf.stop_gradient(model(x)[0])
    optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=2)
    kernel = scale.kernel.value

    def loss(y, p):
        # The gradient of the row that is read is y[0] hidden, and -y[0] hidden by its logit.
        read, logits = p
        towards = tf.reduce_sum(read * y[1] / kernel)
        return y[0][0, 0] * (towards - tf.reduce_sum(logits * y[2]))

    for size in (1.0, 1e4, 1e12):
        y = [
            np.float32([[size], [0.0]]),
            hidden.numpy(),
            np.eye(40, dtype="float32")[x],
        ]
        clipped = keras_dp.clipped_gradients(model, x, y, optimizer=optimizer, loss=loss)
        assert np.all(np.isfinite(clipped.sums[0]))
        assert np.linalg.norm(clipped.sums[0]) <= 1


class TiedByHand(keras.Model):
    def __init__(self):
        super().__init__()
        self.table = L.Embedding(zoo.VOCABULARY, 4)
        self.dense = L.Dense(4)

    def call(self, x):
        hidden = self.dense(self.table(x))
        return keras.ops.matmul(hidden, keras.ops.transpose(self.table.embeddings))


def test_tied_by_hand_is_told_of_reversible_embedding():
    model = TiedByHand()
    x = np.random.default_rng(0).integers(0, zoo.VOCABULARY, (5, 6)).astype("int32")
    model(x)
    optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=0.05, noise_multiplier=0.0, batch_size=5)
    want = checks.plain_loop(model, x, x, 0.05)[1]
    with pytest.warns(UserWarning, match=r"vectorized.*read outside.*ReversibleEmbedding.*reverse"):
        got = keras_dp.clipped_gradients(
            model, x, x, optimizer=optimizer, loss=checks._crossentropy()
        )
    checks.assert_sums_close(got.sums, want)
