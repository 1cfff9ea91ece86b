"""New last layers, and what is frozen beneath them."""

import keras
import numpy as np
import pytest

import models


def test_initial_scale_of_the_logits():
    """Standard deviation init_scale / sqrt(inputs); zeros at 0; Keras's own by default."""
    x = np.ones((1, 4096), np.float32)
    for scale in (0.0, 0.01, 1.0):
        layer = models.logits_layer(50, scale)
        layer(x)
        np.testing.assert_allclose(np.std(layer.kernel), scale / 64, rtol=0.02)
        assert np.abs(layer.bias).max() == 0
    default = models.logits_layer(50)
    assert isinstance(default.kernel_initializer, keras.initializers.GlorotUniform)
    with pytest.raises(ValueError, match="at least 0 or None, received -1"):
        models.logits_layer(3, -1)


def test_a_new_head_keeps_all_else():
    old = models.resnet((16, 16, 3), 7, None, blocks=(1, 1), width=4, groups=2)
    new = models.replace_head(old, 3)
    x = np.random.default_rng(0).normal(size=(2, 16, 16, 3)).astype(np.float32)
    assert new.output_shape == (None, 3)
    np.testing.assert_array_equal(new(x), np.zeros((2, 3)))  # init_scale 0
    assert [layer.name for layer in new.layers] == [layer.name for layer in old.layers]
    for mine, theirs in zip(new.layers[:-1], old.layers[:-1]):
        assert mine is theirs
    assert old.output_shape == (None, 7)
    with pytest.raises(ValueError, match="Activation; one that makes logits"):
        models.replace_head(
            keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(2), keras.layers.Activation("relu")]
            ),
            3,
        )


def test_six_parts_of_a_resnet18_are_those_of_kurakin_et_al():
    """Convolution, padding, pooling and three of four stages."""
    model = models.resnet((64, 64, 3), 5, stem="large", version=2)
    names = [name for name, _ in models.parts(model)]
    stages = ["stage1", "stage2", "stage3", "stage4"]
    assert names == [
        "stem_conv",
        "stem_pad",
        "stem_pool",
        *stages,
        "norm",
        "activation",
        "mean",
    ] + ["logits"]
    assert models.freeze_parts(model, 6) == names[:6]
    trained = {w.path.split("/")[-2].split("_")[0] for w in model.trainable_weights}
    assert trained == {"stage4", "norm", "logits"}
    everything = models.resnet((64, 64, 3), 5, stem="large", version=2)
    assert models.freeze_parts(everything, 0) == []
    assert len(everything.trainable_weights) == len(everything.weights)


def test_blocks_of_a_transformer_are_parts():
    model = models.vit(num_classes=5, patch_size=8, dim=12, depth=2, pool="token")
    names = [name for name, _ in models.parts(model)]
    assert names == ["patches", "sequence", "token", "position", "block1", "block2"] + [
        "norm",
        "first",
        "features",
        "logits",
    ]
    models.freeze_parts(model, 5)
    assert not model.get_layer("block1_attention").trainable_weights
    assert model.get_layer("block2_attention").trainable_weights


def test_freezing_too_much_is_refused():
    model = models.cnn()
    with pytest.raises(ValueError, match="has 10 parts.*below that. Received 10"):
        models.freeze_parts(model, 10)
    with pytest.raises(ValueError, match="Received -1"):
        models.freeze_parts(model, -1)
