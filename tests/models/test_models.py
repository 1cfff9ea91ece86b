"""Parameter counts (with their arithmetic), shapes and what none of the models may contain."""

import inspect

import keras
import numpy as np
import pytest

import keras_dp
import models
from models.vit import SIZES


def dense(inputs, outputs):
    return inputs * outputs + outputs


def conv(kernel, inputs, outputs, bias=0):
    return kernel * kernel * inputs * outputs + bias * outputs


def conv_norm(kernel, inputs, outputs):
    """A convolution without bias and the scale and offset of its group normalisation."""
    return conv(kernel, inputs, outputs) + 2 * outputs


def encoder_block(dim, mlp_dim):
    """Two layer normalisations; query, key, value and output maps; two layers of the MLP."""
    return 2 * 2 * dim + 4 * dense(dim, dim) + dense(dim, mlp_dim) + dense(mlp_dim, dim)


def basic_stage(inputs, width, blocks):
    """Two 3x3 convolutions a block, and a projection where the width changes."""
    first = conv_norm(3, inputs, width) + conv_norm(3, width, width)
    projection = conv_norm(1, inputs, width) if inputs != width else 0
    return first + projection + (blocks - 1) * 2 * conv_norm(3, width, width)


def bottleneck_stage(inputs, width, blocks):
    """1x1, 3x3 and 1x1 convolutions a block; the first block projects its shortcut."""

    def block(channels):
        return (
            conv_norm(1, channels, width)
            + conv_norm(3, width, width)
            + conv_norm(1, width, 4 * width)
        )

    return block(inputs) + conv_norm(1, inputs, 4 * width) + (blocks - 1) * block(4 * width)


def basic_resnet(stem, blocks, classes):
    widths = (64, 64, 128, 256, 512)
    stages = sum(basic_stage(*widths[i : i + 2], blocks[i]) for i in range(4))
    return stem + stages + dense(512, classes)


def bottleneck_resnet(stem, blocks, classes):
    inputs = (64, 256, 512, 1024)
    stages = sum(bottleneck_stage(inputs[i], 64 * 2**i, blocks[i]) for i in range(4))
    return stem + stages + dense(2048, classes)


def wide_stage(inputs, filters, blocks):
    """Norms come before the convolutions here, so the first one has the width of its input."""
    first = 2 * inputs + conv(3, inputs, filters) + conv(1, inputs, filters)
    second = 2 * filters + conv(3, filters, filters)
    return first + second + (blocks - 1) * 2 * second


def wide_resnet(width, blocks, classes):
    filters = (16, 16 * width, 32 * width, 64 * width)
    stages = sum(wide_stage(*filters[i : i + 2], blocks) for i in range(3))
    return conv(3, 3, 16) + stages + 2 * filters[-1] + dense(filters[-1], classes)


def resnet18_v2(classes):
    """Norms before convolutions; projections without; none after the stem, one at the end."""
    stages, inputs = 0, 64
    for width in (64, 128, 256, 512):
        stages += 2 * inputs + conv(3, inputs, width) + 2 * width + conv(3, width, width)
        stages += conv(1, inputs, width) if inputs != width else 0
        stages += 2 * (2 * width + conv(3, width, width))
        inputs = width
    return conv(7, 3, 64) + stages + 2 * 512 + dense(512, classes)


def vit_parameters(size, patch, classes, image=224):
    dim, depth, _ = SIZES[size]
    positions = (image // patch) ** 2 + 1
    blocks = depth * encoder_block(dim, 4 * dim)
    return (
        conv(patch, 3, dim, bias=1) + (positions + 1) * dim + blocks + 2 * dim + dense(dim, classes)
    )


SMALL_STEM, LARGE_STEM = conv_norm(3, 3, 64), conv_norm(7, 3, 64)

# how to build it, its parameters by arithmetic, the same number written out
COUNTS = {
    "cnn": (
        models.cnn,
        # 28 -> 14 (stride 2) -> 13 (pooling) -> 5 (4x4, stride 2, valid) -> 4 (pooling)
        conv(8, 1, 16, bias=1) + conv(4, 16, 32, bias=1) + dense(4 * 4 * 32, 32) + dense(32, 10),
        26_010,
    ),
    # Tramer and Boneh 2021 (arXiv 2011.11660) name 550,570 for CIFAR-10.
    "deep_cnn": (
        models.deep_cnn,
        sum(
            conv(3, inputs, filters, bias=1) + conv(3, filters, filters, bias=1)
            for inputs, filters in ((3, 32), (32, 64), (64, 128))
        )
        + dense(4 * 4 * 128, 128)
        + dense(128, 10),
        550_570,
    ),
    "normalized_linear": (models.normalized_linear, dense(7 * 7 * 81, 10), 39_700),
    "scattering_cnn": (
        models.scattering_cnn,
        conv(3, 81, 16, bias=1) + conv(3, 16, 32, bias=1) + dense(4 * 4 * 32, 32) + dense(32, 10),
        33_066,
    ),
    "linear_head": (lambda: models.linear_head((768,), 1000), dense(768, 1000), 769_000),
    "mlp": (models.mlp, dense(784, 1024) + dense(1024, 1024) + dense(1024, 10), 1_863_690),
    "resnet18": (models.resnet, basic_resnet(SMALL_STEM, (2, 2, 2, 2), 10), 11_173_962),
    "resnet34": (
        lambda: models.resnet(depth=34),
        basic_resnet(SMALL_STEM, (3, 4, 6, 3), 10),
        21_282_122,
    ),
    # With the large stem and 1,000 classes these are the counts of the original networks: group
    # normalisation has as many weights as batch normalisation.
    "resnet18_imagenet": (
        lambda: models.resnet((224, 224, 3), 1000, stem="large"),
        basic_resnet(LARGE_STEM, (2, 2, 2, 2), 1000),
        11_689_512,
    ),
    "resnet34_imagenet": (
        lambda: models.resnet((224, 224, 3), 1000, 34, stem="large"),
        basic_resnet(LARGE_STEM, (3, 4, 6, 3), 1000),
        21_797_672,
    ),
    "resnet18_imagenet_v2": (
        lambda: models.resnet((224, 224, 3), 1000, stem="large", version=2),
        resnet18_v2(1000),
        11_687_720,
    ),
    "resnet18_layer_norm": (
        lambda: models.resnet(norm="layer"),
        basic_resnet(SMALL_STEM, (2, 2, 2, 2), 10),
        11_173_962,
    ),
    "resnet50_imagenet": (
        lambda: models.resnet((224, 224, 3), 1000, depth=50, stem="large"),
        bottleneck_resnet(LARGE_STEM, (3, 4, 6, 3), 1000),
        25_557_032,
    ),
    "wrn16_4": (models.wide_resnet, wide_resnet(4, 2, 10), 2_748_890),
    # One gain for each of the 2,256 filters.
    "wrn16_4_standardized": (
        lambda: models.wide_resnet(weight_standardization=True),
        wide_resnet(4, 2, 10) + 16 + 5 * 64 + 5 * 128 + 5 * 256,
        2_748_890 + 2_256,
    ),
    "wrn40_4": (lambda: models.wide_resnet(depth=40), wide_resnet(4, 6, 10), 8_949_210),
    "vit": (
        models.vit,
        # 8 x 8 patches of 4 x 4 pixels, a position table, the last normalisation
        conv(4, 3, 192, bias=1) + 64 * 192 + 6 * encoder_block(192, 768) + 2 * 192 + dense(192, 10),
        2_693_194,
    ),
    "text_transformer": (
        models.text_transformer,
        10_000 * 128 + 128 * 128 + 2 * encoder_block(128, 512) + 2 * 128 + dense(128, 2),
        1_693_442,
    ),
    "text_transformer_without_positions": (
        lambda: models.text_transformer(positions=False),
        10_000 * 128 + 2 * encoder_block(128, 512) + 2 * 128 + dense(128, 2),
        1_677_058,
    ),
    "transfer_cnn": (
        models.transfer_cnn,
        # 28 -> 14 -> 7 by two strides of 2; the fixed norm has no weights
        conv(5, 1, 32, bias=1)
        + conv(3, 32, 64, bias=1)
        + conv(3, 64, 64, bias=1)
        + dense(7 * 7 * 64, 128)
        + dense(128, 10),
        459_082,
    ),
    "lstm": (
        models.lstm,
        # four gates, each from 64 inputs, 128 states and a bias
        10_000 * 64 + 4 * dense(64 + 128, 128) + dense(128, 2),
        739_074,
    ),
}


# Dosovitskiy et al. 2021 (arXiv 2010.11929), table 1: B 86 M, L 307 M, H 632 M; Touvron et al. 2021
# (arXiv 2012.12877), table 1: Ti 5 M, S 22 M. The exact ones of B, L and H are those that
# torchvision documents for vit_b_16, vit_b_32, vit_l_16, vit_l_32 and vit_h_14.
VITS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
}


@pytest.mark.parametrize("variant", VITS)
def test_vit_variants_have_the_published_parameter_counts(variant):
    size, patch = variant.split("/")
    assert vit_parameters(size, int(patch), 1000) == VITS[variant]
    with keras.StatelessScope(initialize_variables=False):  # the shapes alone: H has 2.5 GB
        model = models.vit_variant(variant)
        assert sum(int(np.prod(w.shape)) for w in model.weights) == VITS[variant]
    keras.backend.clear_session()


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_count(name):
    build, arithmetic, written = COUNTS[name]
    assert arithmetic == written
    assert build().count_params() == arithmetic


def tiny_models():
    """Small versions of all public models, with inputs for them."""
    rng = np.random.default_rng(0)
    images = rng.uniform(size=(3, 32, 32, 3)).astype(np.float32)
    tokens = rng.integers(0, 50, (3, 12)).astype(np.int32)
    return {
        "cnn": (models.cnn(num_classes=5), images[:, :28, :28, :1]),
        "mlp": (models.mlp((32, 32, 3), 5, hidden_units=(8,)), images),
        "deep_cnn": (models.deep_cnn(num_classes=5), images),
        "normalized_linear": (models.normalized_linear((32, 32, 3), 5), images),
        "scattering_cnn": (models.scattering_cnn((32, 32, 3), 5, groups=3), images),
        "linear_head": (models.linear_head((32, 32, 3), 5, init_scale=1.0), images),
        "resnet": (models.resnet(num_classes=5), images),
        "resnet_v2": (
            models.resnet(
                num_classes=5, depth=None, blocks=(1, 2), version=2, width=4, norm="layer"
            ),
            images,
        ),
        "resnet_standardized": (
            models.resnet(
                num_classes=5,
                depth=None,
                blocks=(1, 1),
                bottleneck=True,
                stem="large",
                width=4,
                groups=2,
                weight_standardization=True,
            ),
            images,
        ),
        "wide_resnet": (models.wide_resnet(num_classes=5, depth=10, width=1), images),
        "vit": (models.vit(num_classes=5, patch_size=8, dim=12, depth=1), images),
        "vit_variant": (
            models.vit(num_classes=5, patch_size=8, dim=12, depth=1, pool="token"),
            images,
        ),
        "text_transformer": (models.text_transformer(12, 50, 5, dim=8, depth=1), tokens),
        "transfer_cnn": (models.transfer_cnn(num_classes=5), images[:, :28, :28, :1]),
        "lstm": (models.lstm(12, 50, 5, dim=8, units=8), tokens),
    }


def test_logits_do_not_depend_on_the_other_examples():
    """What private training needs, and what batch normalisation in training mode would break."""
    cases = tiny_models()
    functions = {name for name in models.__all__ if inspect.isfunction(getattr(models, name))}
    helpers = {"freeze_parts", "load_vit_weights", "logits_layer", "parts", "replace_head"}
    assert functions - helpers - {"scattering_features"} <= set(cases)
    for name, (model, x) in cases.items():
        together = np.asarray(model(x, training=True))
        alone = np.concatenate([model(x[i : i + 1], training=True) for i in range(len(x))])
        assert together.shape == (3, 5), name
        np.testing.assert_allclose(together, alone, rtol=0, atol=2e-4, err_msg=name)
        if name != "normalized_linear":  # whose weights start at zero
            assert np.abs(together[0] - together[1]).max() > 1e-4, name
        assert keras_dp.validate(model) == [], name


def test_the_position_table_survives_saving(tmp_path):
    """Without a registered class, loading would ask for custom_objects."""
    model = models.vit(num_classes=5, patch_size=8, dim=12, depth=1)
    x = np.random.default_rng(0).uniform(size=(2, 32, 32, 3)).astype(np.float32)
    model.save(tmp_path / "vit.keras")
    loaded = keras.saving.load_model(tmp_path / "vit.keras")
    np.testing.assert_allclose(loaded(x), model(x), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(
        loaded.get_layer("position").table, model.get_layer("position").table
    )


def test_tanh_bounds_the_features():
    model = models.cnn(activation="tanh")
    features = keras.Model(model.input, model.get_layer("hidden_activation").output)
    x = 100 * np.random.default_rng(0).normal(size=(4, 28, 28, 1)).astype(np.float32)
    values = features.predict(x, verbose=0)
    assert np.abs(values).max() <= 1
    assert values.min() < 0


def test_tempered_sigmoid_is_its_formula():
    x = np.linspace(-4, 4, 9, dtype=np.float32)
    default = models.TemperedSigmoid()(x)
    np.testing.assert_allclose(default, np.tanh(x), atol=1e-6)  # s = 2, T = 2, o = 1
    other = models.TemperedSigmoid(3.0, 0.5, 1.5)(x)
    np.testing.assert_allclose(other, 3 / (1 + np.exp(-0.5 * x)) - 1.5, atol=1e-6)
    settings = {"scale": 3.0, "inverse_temperature": 0.5, "offset": 1.5}
    layer = models.cnn(activation=settings).get_layer("activation1")
    assert {name: layer.get_config()[name] for name in settings} == settings


def test_transfer_features_have_one_norm():
    """So no example's gradient for the logits exceeds sqrt(8^2 + 1) * sqrt(2)."""
    model = models.transfer_cnn()
    features = keras.Model(model.input, model.get_layer("logits").input)
    x = np.random.default_rng(0).uniform(size=(6, 28, 28, 1)).astype(np.float32)
    x *= np.array([1e-2, 1, 1, 1, 1, 100], np.float32).reshape(6, 1, 1, 1)
    norms = np.linalg.norm(features.predict(x, verbose=0), axis=-1)
    np.testing.assert_allclose(norms, 8, rtol=1e-3)


def test_position_table_is_added_and_learned():
    layer = models.LearnedPosition()
    x = np.zeros((2, 5, 3), np.float32)
    np.testing.assert_array_equal(layer(x)[0], layer.table)
    assert [w.shape for w in layer.trainable_weights] == [(5, 3)]
    with pytest.raises(ValueError, match=r"fixed number of positions.*None"):
        models.LearnedPosition()(keras.Input((None, 3)))


def test_token_order_is_seen_only_with_positions():
    tokens = np.random.default_rng(0).integers(0, 50, (1, 12)).astype(np.int32)
    for positions in (True, False):
        model = models.text_transformer(12, 50, dim=8, depth=1, positions=positions)
        difference = np.abs(model(tokens) - model(tokens[:, ::-1])).max()
        assert (difference > 1e-4) == positions


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: models.resnet(depth=20), r"one of \[18, 34, 50, 101\], received 20"),
        (lambda: models.resnet(stem="tiny"), "received 'tiny'"),
        (lambda: models.resnet(version=3), "version must be 1 or 2, received 3"),
        (lambda: models.resnet(norm="batch"), "received 'batch'"),
        (lambda: models.resnet(groups=24), "groups=24 for 64 channels"),
        (lambda: models.resnet(blocks=(1, 1)), r"depth=None with blocks=\(1, 1\)"),
        (lambda: models.vit(pool="max"), "received 'max'"),
        (lambda: models.vit_variant("B16"), "such as B/16; received 'B16'"),
        (lambda: models.TemperedSigmoid(scale=0), "scale must be above 0, received 0"),
        (lambda: models.wide_resnet(depth=12), r"6 n \+ 4 .*received 12"),
        (lambda: models.vit((30, 32, 3)), r"multiples of patch_size.*\(30, 32, 3\)"),
        (lambda: models.vit(dim=64, heads=3), "dim=64, heads=3"),
    ],
)
def test_bad_arguments_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
