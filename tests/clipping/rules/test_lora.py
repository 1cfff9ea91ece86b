"""LoRA: the factors' gradients, that the frozen weight costs nothing, and a transformer."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_dp
from keras_dp import _keras, testing
from keras_dp.clipping import rules
from tests.fixtures import checks, zoo


def _with_lora(layer, shape, rank=2, alpha=3):
    layer.build((None, *shape))
    layer.enable_lora(rank, lora_alpha=alpha)
    return layer


@pytest.mark.parametrize("shape", [(4,), (6, 4), (2, 3, 4)])
def test_dense(shape):
    testing.check_rule(_with_lora(L.Dense(5, activation="gelu"), shape), shape)


@pytest.mark.parametrize(
    "equation, output_shape, shape",
    [
        ("ab,bc->ac", (5,), (4,)),
        ("abc,cd->abd", (6, 5), (6, 4)),
        ("abc,bcd->abd", (6, 3), (6, 4)),  # the kernel has a block for each position
        ("abc,bcde->ade", (3, 2), (6, 4)),
        ("abc,cde->abde", (6, 3, 2), (6, 4)),  # query, key and value of attention
        ("abcd,cde->abe", (6, 5), (6, 3, 2)),  # and its output
        ("...x,xy->...y", (2,), (6, 4)),
        ("abc,ce->ae", (3,), (6, 4)),  # b is summed away
    ],
)
def test_einsum_dense(equation, output_shape, shape):
    layer = L.EinsumDense(equation, output_shape=output_shape, activation="tanh")
    layer = _with_lora(layer, shape)
    assert rules.rule_for(layer) is not None
    testing.check_rule(layer, shape)


@pytest.mark.parametrize(
    "equation, output_shape", [("abc,dc->abd", (6, 5)), ("abc,bc->abc", (6, 4))]
)
def test_einsum_dense_whose_last_label_is_not_new(equation, output_shape):
    """The fallback answers."""
    layer = _with_lora(L.EinsumDense(equation, output_shape=output_shape), (6, 4))
    assert rules.rule_for(layer) is None
    testing.check_rule(layer, (6, 4))


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3)])
def test_embedding(shape):
    testing.check_rule(_with_lora(L.Embedding(7, 4), shape), shape, dtype="int32")


def test_a_kernel_that_is_trained_beside_its_factors():
    layer = _with_lora(L.Dense(5), (6, 4))
    layer._kernel.trainable = True
    assert len(layer.trainable_variables) == 4
    testing.check_rule(layer, (6, 4))


@pytest.mark.parametrize("frozen", ["lora_kernel_a", "lora_kernel_b"])
def test_one_frozen_factor(frozen):
    layer = _with_lora(L.Dense(5), (6, 4))
    getattr(layer, frozen).trainable = False
    testing.check_rule(layer, (6, 4))


@pytest.mark.parametrize(
    "layer, shape",
    [
        (L.Conv1D(3, 2, padding="causal", activation="tanh"), (6, 2)),
        (L.Conv2D(3, 2, 2, padding="same", activation="tanh"), (5, 5, 2)),
        (L.Conv2D(3, 2, dilation_rate=2, data_format="channels_last"), (5, 5, 2)),
        (L.Conv3D(2, 2), (3, 3, 3, 2)),
        (L.Conv2D(4, 2, groups=2), (4, 4, 2)),  # by the fallback
    ],
    ids=["1d", "strided", "dilated", "3d", "grouped"],
)
def test_convolutions(layer, shape):
    layer = _with_lora(layer, shape)
    assert (rules.rule_for(layer) is None) == (layer.groups > 1)
    testing.check_rule(layer, shape)


def _fine_tuned_transformer():
    """A small transformer with LoRA in the attention's dense layers; all else is frozen."""
    x = inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(zoo.VOCABULARY, 8)(x)
    for _ in range(2):
        attention = L.MultiHeadAttention(2, 4)
        x = L.LayerNormalization()(x + attention(x, x, use_causal_mask=True))
        x = L.LayerNormalization()(x + L.Dense(8)(L.Dense(16, activation="gelu")(x)))
    model = keras.Model(inputs, L.Dense(zoo.CLASSES)(L.GlobalAveragePooling1D()(x)))
    for layer in _keras.all_layers(model):
        for variable in _keras.own_trainable_variables(layer):
            variable.trainable = False
        if isinstance(layer, L.EinsumDense):
            layer.enable_lora(2)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.3 * rng.normal(size=variable.shape))
    return model


@pytest.mark.filterwarnings("error:keras_dp")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_transformer_with_lora_in_its_attention(jit_compile):
    model = _fine_tuned_transformer()
    names = {v.path.split("/")[-1] for v in model.trainable_variables}
    assert names == {"lora_kernel_a", "lora_kernel_b"}
    assert len(model.trainable_variables) == 16
    x, y = zoo.batch(model)
    norms, _ = checks.plain_loop(model, x, y, 1.0)
    optimizer = keras_dp.DPSGD(
        1.0, l2_norm_clip=float(np.median(norms)), noise_multiplier=0.0, batch_size=5
    )
    checks.check_loop(model, optimizer, x, y, jit_compile=jit_compile)


def test_the_frozen_kernel_has_no_gradient_per_example():
    """A kernel of 512 x 256 and factors of rank 2: nothing in the graph has a kernel's size per
    example, nor is there a kernel's gradient."""
    model = keras.Sequential([keras.Input((8, 512)), L.Dense(256), L.Flatten(), L.Dense(3)])
    model.layers[0].enable_lora(2)
    optimizer = keras_dp.DPSGD(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=16)
    model.compile(optimizer, loss=checks._crossentropy())

    @tf.function
    def run(x, y):
        return keras_dp.clipped_gradients(model, x, y, optimizer=optimizer).sums

    graph = run.get_concrete_function(
        tf.TensorSpec([16, 8, 512]), tf.TensorSpec([16], tf.int32)
    ).graph
    kernels = 0
    for operation in graph.get_operations():
        for tensor in operation.outputs:
            size = tensor.shape.num_elements()
            assert size is None or size <= 512 * 256, operation
            kernels += operation.type == "MatMul" and tensor.shape == (512, 256)
    assert kernels == 1  # A B, in the forward pass
