"""Attention layers: their scales, their dropout, and multi-head attention in all its options."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp import testing
from keras_dp.clipping import layerwise, rules
from tests.fixtures import checks, zoo

QUERY_AND_VALUE = [(5, 4), (6, 4)]


@pytest.mark.parametrize(
    "layer",
    [
        lambda: L.Attention(use_scale=True),
        lambda: L.Attention(use_scale=True, score_mode="concat"),
        lambda: L.Attention(score_mode="concat"),
        lambda: L.AdditiveAttention(),
    ],
)
@pytest.mark.parametrize("call", [{}, {"use_causal_mask": True, "return_attention_scores": True}])
def test_attention(layer, call):
    layer = layer()
    testing.check_rule(layer, QUERY_AND_VALUE, call_kwargs=call)
    assert rules.rule_for(layer) is not None


def test_query_value_and_key():
    testing.check_rule(L.Attention(use_scale=True), [(5, 4), (6, 3), (6, 4)])
    testing.check_rule(L.AdditiveAttention(), [(5, 4), (6, 3), (6, 4)])


def test_one_frozen_weight():
    layer = L.Attention(use_scale=True, score_mode="concat")
    layer.build([(None, *s) for s in QUERY_AND_VALUE])
    layer.scale.trainable = False
    testing.check_rule(layer, QUERY_AND_VALUE)


@pytest.mark.parametrize("dtype", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("layer", [L.Attention, L.AdditiveAttention])
def test_half_precision(layer, dtype):
    testing.check_rule(layer(use_scale=True, dtype=dtype), QUERY_AND_VALUE, tolerance=0.1)


def _with_masks(layer):
    """Attention over embedded ids whose padding is masked."""
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(zoo.VOCABULARY, 4, mask_zero=True)(inputs)
    return keras.Model(
        inputs, L.Dense(zoo.CLASSES)(L.GlobalAveragePooling1D()(layer([x[:, :4], x])))
    )


@pytest.mark.filterwarnings("error:keras_dp")
@pytest.mark.parametrize(
    "layer", [lambda: L.AdditiveAttention(), lambda: L.Attention(True, "concat")]
)
def test_masks(layer):
    model = _with_masks(layer())
    x, y = zoo.batch(model)
    norms, _ = checks.plain_loop(model, x, y, 1.0)
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=float(np.median(norms)), noise_multiplier=0.0, batch_size=5
    )
    checks.check_loop(model, optimizer, x, y)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: L.Attention(use_scale=True, dropout=0.4),
        lambda: L.AdditiveAttention(dropout=0.4),
        lambda: zoo.SelfAttention(L.MultiHeadAttention(2, 3, dropout=0.4)),
    ],
)
def test_dropout(layer):
    """The masks that the forward pass drew are those of the gradients.

    The batch is run once more from the same random state, and each example's loss differentiated.
    """
    inputs = keras.Input((5, 4))
    layer = layer()
    several = isinstance(layer, L.Attention)
    model = keras.Model(inputs, L.Dense(3)(layer([inputs, inputs] if several else inputs)))
    x = tf.constant(np.random.default_rng(0).normal(size=(4, 5, 4)), tf.float32)
    variables = list(model.trainable_variables)
    generators = [g for nested in model._flatten_layers() for g in nested._seed_generators]
    state = [(g.state, tf.convert_to_tensor(g.state.value)) for g in generators]

    def loss(y, p):
        return tf.reduce_sum(y * p)

    y = tf.constant(np.random.default_rng(1).normal(size=(4, 5, 3)), tf.float32)
    with keras.StatelessScope(state_mapping=state):
        found, _ = layerwise.weight_forms(model, loss, variables, (x, y, None))
    with keras.StatelessScope(state_mapping=state), tf.GradientTape(persistent=True) as tape:
        p = model(x, training=True)
        losses = [loss(y[i], p[i]) for i in range(4)]
    for variable in variables:
        want = [tape.gradient(one, variable.value) for one in losses]
        got = found[id(variable)].per_example()
        np.testing.assert_allclose(got, tf.stack(want), rtol=2e-4, atol=2e-5)


@pytest.mark.filterwarnings("error:keras_dp")
@pytest.mark.parametrize(
    "layer, shape, call",
    [
        (lambda: L.MultiHeadAttention(2, 3, value_dim=5, output_shape=6), (5, 4), {}),
        (lambda: L.MultiHeadAttention(2, 3, use_bias=False), (5, 4), {"use_causal_mask": True}),
        (lambda: L.MultiHeadAttention(2, 3, output_shape=(2, 3)), (5, 4), {}),
        (lambda: L.MultiHeadAttention(2, 3, attention_axes=(1, 2)), (2, 3, 4), {}),
        (lambda: L.MultiHeadAttention(2, 3, attention_axes=2), (2, 3, 4), {}),
        (lambda: L.MultiHeadAttention(2, 3), (5, 4), {"return_attention_scores": True}),
        (lambda: L.MultiHeadAttention(2, 3, flash_attention=False), (5, 4), {}),
        (lambda: L.GroupQueryAttention(3, 4, 2), (5, 4), {}),
        (lambda: L.GroupQueryAttention(3, 2, 1, use_bias=False), (5, 4), {"use_causal_mask": True}),
        (lambda: L.GroupQueryAttention(3, 4, 2), (5, 4), {"return_attention_scores": True}),
    ],
)
def test_layers_made_of_einsum_dense(layer, shape, call):
    around = zoo.SelfAttention(layer())
    testing.check_rule(around, shape, call_kwargs=call)
    assert rules.rule_for(around.attention) is None
    assert not rules.is_whole(around.attention)


def test_an_attention_mask():
    mask = np.tril(np.ones((5, 5), "bool"))[None]
    testing.check_rule(
        zoo.SelfAttention(L.MultiHeadAttention(2, 3)), (5, 4), call_kwargs={"attention_mask": mask}
    )
