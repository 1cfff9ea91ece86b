"""Vision transformers."""

import keras

from models.transformer import ClassToken, LearnedPosition, encoder_block

# size: (channels, blocks, attention heads); the MLPs have four times as many hidden units.
# B, L and H are of Dosovitskiy et al. 2021, table 1; Ti and S of Touvron et al. 2021 (arXiv
# 2012.12877) and Steiner et al. 2021 (arXiv 2106.10270, table 1).
SIZES = {
    "Ti": (192, 12, 3),
    "S": (384, 12, 6),
    "B": (768, 12, 12),
    "L": (1024, 24, 16),
    "H": (1280, 32, 16),
}


def vit(
    input_shape=(32, 32, 3),
    num_classes=10,
    patch_size=4,
    dim=192,
    depth=6,
    heads=3,
    mlp_dim=None,
    pool="mean",
    dropout=0.0,
    epsilon=1e-5,
    name="vit",
):
    """A ViT (Dosovitskiy et al. 2021, arXiv 2010.11929).

    The defaults have the width of ViT-Ti (192 channels, 3 heads) and half of its 12 blocks, for
    32x32 images in 64 patches. :func:`vit_variant` makes the published ones.

    Args:
      input_shape: ``(height, width, channels)``; height and width are multiples of ``patch_size``.
      num_classes: number of logits; 0 for none, then the model gives the pooled features.
      patch_size: side of the square patches.
      dim: channels of the residual stream, a multiple of ``heads``.
      depth: number of encoder blocks.
      heads: attention heads a block.
      mlp_dim: hidden units of each block's MLP; ``4 * dim`` by default.
      pool: ``"mean"`` averages the positions; ``"token"`` adds a class token and takes that.
      dropout: share of the outputs of attention and MLP that is dropped in training.
      epsilon: of the layer normalisations.
      name: the model's name.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``. Encoder block k, from 1 on,
      has the layers block<k>_attention, block<k>_mlp1 and so on; ``models.parts`` groups them.

    Raises:
      ValueError: when the image is not made of whole patches, or ``dim`` of whole heads, or for
        another ``pool``.
    """
    height, width, _ = input_shape
    if height % patch_size or width % patch_size:
        raise ValueError(
            f"Height and width must be multiples of patch_size, received input_shape="
            f"{tuple(input_shape)} and patch_size={patch_size}."
        )
    if pool not in ("mean", "token"):
        raise ValueError(f'pool must be "mean" or "token", received {pool!r}.')
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(dim, patch_size, patch_size, name="patches")(inputs)
    x = layers.Reshape(((height // patch_size) * (width // patch_size), dim), name="sequence")(x)
    if pool == "token":
        x = ClassToken(name="token")(x)
    x = LearnedPosition(name="position")(x)
    for block in range(1, depth + 1):
        x = encoder_block(x, heads, mlp_dim or 4 * dim, epsilon, dropout, f"block{block}")
    x = layers.LayerNormalization(epsilon=epsilon, name="norm")(x)
    if pool == "token":
        x = layers.Cropping1D((0, x.shape[1] - 1), name="first")(x)
        x = layers.Reshape((dim,), name="features")(x)
    else:
        x = layers.GlobalAveragePooling1D(name="features")(x)
    if num_classes:
        x = layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, x, name=name)


def vit_variant(variant="B/16", image_size=224, num_classes=1000, pool="token", name=None):
    """One of the published ViTs, ``"Ti"``, ``"S"``, ``"B"``, ``"L"`` or ``"H"`` with its patches.

    ``models.load_vit_weights`` reads the weights that were published for them.

    Args:
      variant: size and side of the patches, such as ``"B/16"``, ``"S/32"`` or ``"H/14"``.
      image_size: side of the square colour images, a multiple of the patch's side.
      num_classes: number of logits; 0 for features.
      pool: ``"token"`` as published, or ``"mean"``.
      name: the model's name; such as ``"vit_b16"`` by default.

    Returns:
      A ``keras.Model`` from images ``[batch, image_size, image_size, 3]`` to logits. The published
      weights expect pixels from -1 to 1.

    Raises:
      ValueError: for a variant that is none, or an image that is not made of whole patches.
    """
    size, _, patch = variant.partition("/")
    if size not in SIZES or not patch.isdigit() or int(patch) < 1:
        raise ValueError(
            f"variant must be one of {', '.join(SIZES)}, a slash and the side of the patches, such "
            f"as B/16; received {variant!r}."
        )
    dim, depth, heads = SIZES[size]
    return vit(
        (image_size, image_size, 3),
        num_classes,
        int(patch),
        dim,
        depth,
        heads,
        pool=pool,
        epsilon=1e-6,
        name=name or f"vit_{size.lower()}{patch}",
    )
