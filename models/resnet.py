"""ResNets whose normalisation looks at one example only."""

import keras

# depth: (residual blocks in each of the four stages, whether they are bottlenecks)
_STAGES = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
}


def resnet(input_shape=(32, 32, 3), num_classes=10, depth=18, stem="small", groups=16, name=None):
    """A ResNet (He et al. 2016, arXiv 1512.03385) with group normalisation.

    Batch normalisation mixes the examples of a batch, so that no gradient belongs to one example;
    group normalisation (Wu and He 2018, arXiv 1803.08494) does not, which is why the private
    ImageNet models of Kurakin et al. 2022 (arXiv 2201.12328) use it.

    Args:
      input_shape: ``(height, width, channels)``.
      num_classes: number of logits.
      depth: 18 or 34 (blocks of two 3x3 convolutions), 50 or 101 (bottleneck blocks).
      stem: ``"small"``, one 3x3 convolution, for images like 32x32; ``"large"``, a 7x7 convolution
        and a 3x3 max-pooling of stride 2 each, for images like 224x224.
      groups: groups of channels that are normalised together.
      name: the model's name; ``"resnet<depth>"`` by default.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``.

    Raises:
      ValueError: for a depth or a stem that is not listed.
    """
    if depth not in _STAGES:
        raise ValueError(f"depth must be one of {sorted(_STAGES)}, received {depth!r}.")
    if stem not in ("small", "large"):
        raise ValueError(f'stem must be "small" or "large", received {stem!r}.')
    blocks, bottleneck = _STAGES[depth]
    layers = keras.layers
    inputs = x = keras.Input(input_shape)
    if stem == "small":
        x = _conv_norm(x, 64, 3, 1, groups)
        x = layers.Activation("relu")(x)
    else:
        x = _conv_norm(x, 64, 7, 2, groups)
        x = layers.Activation("relu")(x)
        x = layers.MaxPooling2D(3, 2, padding="same")(x)
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _residual_block(x, 64 * 2**stage, stride, groups, bottleneck)
    x = layers.GlobalAveragePooling2D()(x)
    logits = layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, logits, name=name or f"resnet{depth}")


def _residual_block(x, width, stride, groups, bottleneck):
    relu = keras.layers.Activation
    if bottleneck:
        channels = 4 * width
        h = relu("relu")(_conv_norm(x, width, 1, 1, groups))
        h = relu("relu")(_conv_norm(h, width, 3, stride, groups))
        h = _conv_norm(h, channels, 1, 1, groups)
    else:
        channels = width
        h = relu("relu")(_conv_norm(x, width, 3, stride, groups))
        h = _conv_norm(h, width, 3, 1, groups)
    if stride != 1 or x.shape[-1] != channels:
        x = _conv_norm(x, channels, 1, stride, groups)
    return relu("relu")(keras.layers.Add()([h, x]))


def _conv_norm(x, filters, kernel, stride, groups):
    x = keras.layers.Conv2D(filters, kernel, stride, padding="same", use_bias=False)(x)
    return keras.layers.GroupNormalization(groups=groups, epsilon=1e-5)(x)
