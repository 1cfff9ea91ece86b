"""A vision transformer."""

import keras

from models.transformer import LearnedPosition, encoder_block


def vit(
    input_shape=(32, 32, 3),
    num_classes=10,
    patch_size=4,
    dim=192,
    depth=6,
    heads=3,
    mlp_dim=None,
    name="vit",
):
    """A ViT (Dosovitskiy et al. 2021, arXiv 2010.11929) that averages its positions.

    The defaults have the width of ViT-Tiny (192 channels, 3 heads) and half of its 12 blocks, for
    32x32 images in 64 patches.

    Args:
      input_shape: ``(height, width, channels)``; height and width are multiples of ``patch_size``.
      num_classes: number of logits.
      patch_size: side of the square patches.
      dim: channels of the residual stream, a multiple of ``heads``.
      depth: number of encoder blocks.
      heads: attention heads a block.
      mlp_dim: hidden units of each block's MLP; ``4 * dim`` by default.
      name: the model's name.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``.

    Raises:
      ValueError: when the image is not made of whole patches, or ``dim`` of whole heads.
    """
    height, width, _ = input_shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"Height and width must be multiples of patch_size, received input_shape="
            f"{tuple(input_shape)} and patch_size={patch_size}."
        )
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(dim, patch_size, patch_size, name="patches")(inputs)
    x = layers.Reshape(((height // patch_size) * (width // patch_size), dim))(x)
    x = LearnedPosition(name="position")(x)
    for _ in range(depth):
        x = encoder_block(x, heads, mlp_dim or 4 * dim)
    x = layers.LayerNormalization(epsilon=1e-5)(x)
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
