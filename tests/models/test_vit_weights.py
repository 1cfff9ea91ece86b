"""Published weights are found by name, shape and place; what does not fit is refused."""

import numpy as np
import pytest

import models


def layer_norm(x, scale, bias):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + 1e-6) * scale + bias


def gelu(x):
    from scipy.special import erf

    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


def arrays(dim=12, depth=2, heads=3, patch=4, side=2, classes=5, seed=0):
    """Random weights under the names and in the shapes of the JAX implementation."""
    rng = np.random.default_rng(seed)

    def random(*shape):
        return rng.normal(0, 0.5, shape).astype(np.float32)

    found = {
        "embedding/kernel": random(patch, patch, 3, dim),
        "embedding/bias": random(dim),
        "cls": random(1, 1, dim),
        "Transformer/posembed_input/pos_embedding": random(1, side * side + 1, dim),
        "Transformer/encoder_norm/scale": random(dim),
        "Transformer/encoder_norm/bias": random(dim),
        "head/kernel": random(dim, classes),
        "head/bias": random(classes),
    }
    for block in range(depth):
        prefix = f"Transformer/encoderblock_{block}/"
        attention = prefix + "MultiHeadDotProductAttention_1/"
        for name in ("query", "key", "value"):
            found[f"{attention}{name}/kernel"] = random(dim, heads, dim // heads)
            found[f"{attention}{name}/bias"] = random(heads, dim // heads)
        found[f"{attention}out/kernel"] = random(heads, dim // heads, dim)
        found[f"{attention}out/bias"] = random(dim)
        for name in ("LayerNorm_0", "LayerNorm_2"):
            found[f"{prefix}{name}/scale"], found[f"{prefix}{name}/bias"] = random(dim), random(dim)
        for name, shape in (("Dense_0", (dim, 4 * dim)), ("Dense_1", (4 * dim, dim))):
            found[f"{prefix}MlpBlock_3/{name}/kernel"] = random(*shape)
            found[f"{prefix}MlpBlock_3/{name}/bias"] = random(shape[1])
    return found


def forward(weights, images, depth=2, patch=4):
    """The ViT of Dosovitskiy et al. 2021, equations 1 to 4, in NumPy."""
    w = weights
    count, height, width, _ = images.shape
    rows, columns = height // patch, width // patch
    x = images.reshape(count, rows, patch, columns, patch, 3).transpose(0, 1, 3, 2, 4, 5)
    x = x.reshape(count, rows * columns, -1) @ w["embedding/kernel"].reshape(patch * patch * 3, -1)
    x = x + w["embedding/bias"]
    x = np.concatenate([np.repeat(w["cls"], count, 0), x], 1)
    x = x + w["Transformer/posembed_input/pos_embedding"]
    for block in range(depth):
        p = f"Transformer/encoderblock_{block}/"
        h = layer_norm(x, w[p + "LayerNorm_0/scale"], w[p + "LayerNorm_0/bias"])
        a = p + "MultiHeadDotProductAttention_1/"
        q, k, v = (
            np.einsum("btd,dhe->bhte", h, w[f"{a}{n}/kernel"]) + w[f"{a}{n}/bias"][:, None]
            for n in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = scores / scores.sum(-1, keepdims=True) @ v
        x = x + np.einsum("bhte,hed->btd", mixed, w[a + "out/kernel"]) + w[a + "out/bias"]
        h = layer_norm(x, w[p + "LayerNorm_2/scale"], w[p + "LayerNorm_2/bias"])
        m = p + "MlpBlock_3/"
        h = gelu(h @ w[m + "Dense_0/kernel"] + w[m + "Dense_0/bias"])
        x = x + h @ w[m + "Dense_1/kernel"] + w[m + "Dense_1/bias"]
    x = layer_norm(x, w["Transformer/encoder_norm/scale"], w["Transformer/encoder_norm/bias"])
    return x[:, 0] @ w["head/kernel"] + w["head/bias"]


def small(classes=5, image=8, **arguments):
    settings = {"patch_size": 4, "dim": 12, "depth": 2, "heads": 3, "epsilon": 1e-6}
    settings |= {"pool": "token"} | arguments
    return models.vit((image, image, 3), classes, **settings)


def test_the_model_is_the_published_function_of_its_weights(tmp_path):
    weights = arrays()
    np.savez(tmp_path / "vit.npz", **weights)
    model = small()
    assert models.load_vit_weights(model, tmp_path / "vit.npz") == []
    images = np.random.default_rng(1).uniform(-1, 1, (3, 8, 8, 3)).astype(np.float32)
    np.testing.assert_allclose(model(images), forward(weights, images), atol=5e-3, rtol=1e-3)


def test_a_head_of_another_size_stays_out():
    weights = arrays(classes=7) | {"pre_logits/bias": np.zeros(12, np.float32)}
    model = small(classes=5)
    before = np.array(model.get_layer("logits").kernel)
    unused = models.load_vit_weights(model, weights)
    assert unused == ["head/bias", "head/kernel", "pre_logits/bias"]
    np.testing.assert_array_equal(model.get_layer("logits").kernel, before)
    np.testing.assert_array_equal(model.get_layer("token").token, weights["cls"])
    with pytest.raises(ValueError, match=r"head/kernel.*\(12, 7\).*\(12, 5\)"):
        models.load_vit_weights(small(classes=5), weights, head=True)
    features = small(classes=0)
    assert "head/kernel" in models.load_vit_weights(features, weights)
    averaged = small(pool="mean")
    assert "cls" in models.load_vit_weights(averaged, weights)


def test_positions_are_interpolated_for_larger_images():
    """A table that is linear in row and column stays so, from corner to corner."""
    weights = arrays()
    row, column = np.meshgrid([0.0, 1.0], [0.0, 1.0], indexing="ij")
    table = np.stack([row, column, row * 0 + 2] + 9 * [row * 0], -1).reshape(4, 12)
    vector = np.full((1, 12), 5.0)
    weights["Transformer/posembed_input/pos_embedding"] = np.concatenate([vector, table])[None]
    model = small(image=12)
    models.load_vit_weights(model, weights)
    found = np.array(model.get_layer("position").table)
    np.testing.assert_array_equal(found[0], vector[0])
    grid = found[1:].reshape(3, 3, 12)
    np.testing.assert_allclose(grid[:, 0, 0], [0, 0.5, 1], atol=1e-6)
    np.testing.assert_allclose(grid[0, :, 1], [0, 0.5, 1], atol=1e-6)
    np.testing.assert_allclose(grid[..., 2], 2, atol=1e-6)


def test_files_of_other_variants_are_refused():
    with pytest.raises(ValueError, match="has no place for, such as Transformer/encoderblock_2"):
        models.load_vit_weights(small(), arrays(depth=3))
    with pytest.raises(ValueError, match="no array Transformer/encoderblock_1"):
        models.load_vit_weights(small(), arrays(depth=1))
    with pytest.raises(ValueError, match="of another variant"):
        models.load_vit_weights(small(), arrays(dim=24))
