"""ResNets whose normalisation looks at one example only."""

import keras

from models.convolutions import Layers

# depth: (residual blocks in each of the four stages, whether they are bottlenecks)
_STAGES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
}


def resnet(
    input_shape=(32, 32, 3),
    num_classes=10,
    depth=18,
    stem="small",
    version=1,
    blocks=None,
    bottleneck=False,
    width=64,
    norm="group",
    groups=16,
    weight_standardization=False,
    name=None,
):
    """A ResNet (He et al. 2016) with group or layer normalisation.

    Batch normalisation mixes the examples of a batch, so that no gradient belongs to one example;
    group normalisation (Wu and He 2018, arXiv 1803.08494) does not, which is why the private
    ImageNet models of Kurakin et al. 2022 (arXiv 2201.12328) use it. Those are of version 2, with
    32 groups and the large stem.

    Args:
      input_shape: ``(height, width, channels)``.
      num_classes: number of logits.
      depth: 18 or 34 (blocks of two 3x3 convolutions), 50 or 101 (bottleneck blocks). Or None
        with ``blocks``.
      stem: ``"small"``, one 3x3 convolution, for images like 32x32; ``"large"``, a 7x7 convolution
        and a 3x3 max-pooling of stride 2 each, for images like 224x224.
      version: 1, normalisation after each convolution (arXiv 1512.03385); 2, normalisation and
        activation before it, and once before the logits (arXiv 1603.05027). A stage's stride is
        in its first block.
      blocks: blocks in each stage, such as ``(1, 1, 1)``, where ``depth`` is None.
      bottleneck: whether these are bottleneck blocks.
      width: channels of the first stage, 64 in the papers; each further stage has twice as many.
      norm: ``"group"`` or ``"layer"``.
      groups: groups of channels that are normalised together.
      weight_standardization: whether kernels are standardised, see ``StandardizedConv2D``.
      name: the model's name; ``"resnet<depth>"`` by default, with ``v2`` for version 2.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``. Layers of weights are
      called stem_conv, stage<s>_block<b>_conv<c> and so on; ``models.parts`` groups them.

    Raises:
      ValueError: for a depth, stem, version or norm that is not listed.
    """
    if depth is None and blocks:
        depth = "_".join(map(str, blocks))  # for the name
    elif depth in _STAGES and blocks is None:
        blocks, bottleneck = _STAGES[depth]
    elif blocks is not None:
        raise ValueError(f"Pass depth=None with blocks={blocks!r}, received depth={depth!r}.")
    else:
        raise ValueError(f"depth must be one of {sorted(_STAGES)}, received {depth!r}.")
    if stem not in ("small", "large"):
        raise ValueError(f'stem must be "small" or "large", received {stem!r}.')
    if version not in (1, 2):
        raise ValueError(f"version must be 1 or 2, received {version!r}.")
    make = Layers(norm, groups, weight_standardization)
    block_of = _block_v1 if version == 1 else _block_v2
    inputs = keras.Input(input_shape)
    x = _stem(make, inputs, stem, width, version)
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            label = f"stage{stage + 1}_block{block + 1}"
            x = block_of(make, x, width * 2**stage, stride, bottleneck, label)
    if version == 2:
        x = make.activate(make.norm(x, "norm"), "activation")
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    logits = keras.layers.Dense(num_classes, name="logits")(x)
    suffix = "v2" if version == 2 else ""
    return keras.Model(inputs, logits, name=name or f"resnet{depth}{suffix}")


def _stem(make, x, stem, width, version):
    kernel, stride = (3, 1) if stem == "small" else (7, 2)
    x = make.conv(x, width, kernel, stride, "stem_conv")
    if version == 1:
        x = make.activate(make.norm(x, "stem_norm"), "stem_activation")
    if stem == "large":
        x = keras.layers.ZeroPadding2D(1, name="stem_pad")(x)
        x = keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)
    return x


def _convolutions(width, stride, bottleneck):
    """Filters, kernel size and stride of each convolution of a block."""
    if bottleneck:
        return ((width, 1, 1), (width, 3, stride), (4 * width, 1, 1))
    return ((width, 3, stride), (width, 3, 1))


def _block_v1(make, x, width, stride, bottleneck, label):
    """Convolution, norm, activation; the last activation after the sum with the shortcut."""
    specs, h = _convolutions(width, stride, bottleneck), x
    for number, (filters, kernel, step) in enumerate(specs, 1):
        h = make.conv(h, filters, kernel, step, f"{label}_conv{number}")
        h = make.norm(h, f"{label}_norm{number}")
        if number < len(specs):
            h = make.activate(h, f"{label}_activation{number}")
    channels = specs[-1][0]
    if stride != 1 or x.shape[-1] != channels:
        x = make.conv(x, channels, 1, stride, f"{label}_shortcut")
        x = make.norm(x, f"{label}_shortcut_norm")
    x = keras.layers.Add(name=f"{label}_sum")([h, x])
    return make.activate(x, f"{label}_activation{len(specs)}")


def _block_v2(make, x, width, stride, bottleneck, label):
    """Norm, activation, convolution; a shortcut that changes shape starts after the first two."""
    specs, h = _convolutions(width, stride, bottleneck), x
    channels = specs[-1][0]
    for number, (filters, kernel, step) in enumerate(specs, 1):
        h = make.norm(h, f"{label}_norm{number}")
        h = make.activate(h, f"{label}_activation{number}")
        if number == 1 and (stride != 1 or x.shape[-1] != channels):
            x = make.conv(h, channels, 1, stride, f"{label}_shortcut")
        h = make.conv(h, filters, kernel, step, f"{label}_conv{number}")
    return keras.layers.Add(name=f"{label}_sum")([h, x])
