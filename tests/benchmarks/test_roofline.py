"""Counted work against arithmetic by hand and against TensorFlow's own count."""

import keras
import pytest
import tensorflow as tf

import keras_dp
import models
from benchmarks import roofline, work
from benchmarks.zoo import ZOO

KERNELS = 784 * 1024 + 1024 * 1024 + 1024 * 10


def total(parts):
    return sum(part.flops for part in parts)


def test_mlp_by_hand():
    layers = work.layers_of(models.mlp())
    weights = 1_863_690
    # Forward, weight gradient, and the gradient of the inputs but for the data.
    expected = 2 * 256 * (3 * KERNELS - 784 * 1024) + 2 * weights
    assert total(work.plain(layers, 256)) == expected
    sides = 784 + 1024 + 1024 + 1024 + 1024 + 10
    biases = 1024 + 1024 + 10
    lengths = 2 * 256 * (sides + biases) + weights
    assert total(work.private(layers, 256, set())) == lengths
    every = {path for layer in layers for path in layer.matrices}
    kept = 4 * 256 * KERNELS + 2 * 256 * biases + weights
    assert total(work.private(layers, 256, every)) == kept
    update = work.plain(layers, 256)[-1]
    assert update == work.Work(2 * (1024 * 10 + 10), 3 * 4 * (1024 * 10 + 10))


@pytest.mark.parametrize(
    "build",
    [
        models.cnn,
        models.resnet,
        lambda: models.vit(dim=48, depth=2, heads=3),
        lambda: models.wide_resnet(depth=10, width=2),
    ],
    ids=["cnn", "resnet", "vit", "wide_resnet"],
)
def test_products_are_those_of_the_graph(build):
    """TensorFlow counts the products of the forward pass from its operations."""
    model = build()
    layers = work.layers_of(model)
    counted = sum(2 * layer.other_products for layer in layers)
    counted += sum(2 * m.products for layer in layers for m in layer.matrices.values())
    spec = tf.TensorSpec([1, *model.input_shape[1:]], tf.float32)
    graph = tf.function(model).get_concrete_function(spec).graph
    assert counted == sum(map(product_flops, graph.get_operations()))


def product_flops(operation):
    """Twice the multiplications of one operation; 0 when it is no product."""
    output = operation.outputs[0].shape.num_elements() if operation.outputs else 0
    if operation.type == "Conv2D":
        return 2 * output * operation.inputs[1].shape[:-1].num_elements()
    if operation.type in ("MatMul", "BatchMatMulV2"):
        flag = "transpose_a" if operation.type == "MatMul" else "adj_x"
        contracted = operation.inputs[0].shape[-2 if operation.get_attr(flag) else -1]
        return 2 * output * contracted
    if operation.type == "Einsum":
        left, right = operation.get_attr("equation").decode().split("->")
        sizes = {}
        for term, tensor in zip(left.split(","), operation.inputs):
            sizes |= dict(zip(term, tensor.shape))
        assert set(right) <= set(sizes)
        return 2 * tf.TensorShape(sizes.values()).num_elements()
    return 0


def test_lstm_and_embedding_by_hand():
    layers = work.layers_of(models.lstm(8, 50, 2, dim=4, units=6))
    forward = sum(m.products for layer in layers for m in layer.matrices.values())
    assert forward == 8 * (4 + 6) * 24 + 6 * 2


def test_an_unknown_product_is_not_left_out():
    model = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.DepthwiseConv2D(3)])
    with pytest.raises(ValueError, match="DepthwiseConv2D.*add the class"):
        work.layers_of(model)


@pytest.mark.parametrize("name", ["mlp", "cnn", "lstm"])
def test_every_weight_has_a_way(name):
    entry = ZOO[name]
    model = roofline._private_model(entry)
    assert isinstance(model.optimizer, keras_dp.DPSGD)
    chosen = roofline.ways(model, entry.batch_size, entry.data(1))
    assert set(chosen) == {v.path for v in model.trainable_variables}
    if name == "mlp":  # one position: no gradient of an example is made, but for the biases
        assert {path.split("/")[-1] for path, (_, kept) in chosen.items() if kept} == {"bias"}
    lines = roofline.way_rows(name, model, chosen)
    assert sum(int(line[-1]) for line in lines) == len(chosen)


def test_row_and_bounds():
    machine = roofline.Machine(flops=1e9, bandwidth=1e18, normals=1e6)
    layers = work.layers_of(models.mlp())
    plain, private = roofline.bounds(layers, 256, set(), machine)
    assert plain[2] == pytest.approx(plain[0] / 1e9)  # nothing is bound by memory
    assert private[2] == pytest.approx(private[0] / 1e9 + 1.86369)  # and the noise
    cells = roofline.row("mlp", plain, private, [2 * plain[2], None])
    assert cells[-2].endswith(", 50 %")
    assert cells[-1] == ""
    assert len(cells) == len(roofline.HEADER)


def test_peaks_are_measured():
    machine = roofline.measure_machine(side=16, numbers=64)
    assert min(machine.flops, machine.bandwidth, machine.normals) > 0
