"""Wide ResNets for small images, with group normalisation."""

import keras


def wide_resnet(input_shape=(32, 32, 3), num_classes=10, depth=16, width=4, groups=16, name=None):
    """A WideResNet (Zagoruyko and Komodakis 2016, arXiv 1605.07146) with group normalisation.

    De et al. 2022 (arXiv 2204.13650) train WRN-16-4 and WRN-40-4 privately on CIFAR-10 with group
    normalisation in the place of batch normalisation. This is that network without their weight
    standardisation.

    Args:
      input_shape: ``(height, width, channels)``.
      num_classes: number of logits.
      depth: 6 n + 4, where n is the number of blocks in each of the three stages.
      width: factor on the 16, 32 and 64 channels of the three stages.
      groups: groups of channels that are normalised together.
      name: the model's name; ``"wrn<depth>_<width>"`` by default.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``.

    Raises:
      ValueError: for a depth that is not 6 n + 4.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6 n + 4 (10, 16, 22, 28, ...), received {depth!r}.")
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.Conv2D(16, 3, padding="same", use_bias=False)(inputs)
    for stage in range(3):
        for block in range((depth - 4) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(x, 16 * width * 2**stage, stride, groups)
    x = _norm_relu(x, groups)
    x = layers.GlobalAveragePooling2D()(x)
    logits = layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, logits, name=name or f"wrn{depth}_{width}")


def _block(x, filters, stride, groups):
    """Norm, ReLU and convolution twice; the shortcut changes shape where it must."""
    conv = keras.layers.Conv2D
    h = _norm_relu(x, groups)
    if stride != 1 or x.shape[-1] != filters:
        x = conv(filters, 1, stride, padding="same", use_bias=False)(h)
    h = conv(filters, 3, stride, padding="same", use_bias=False)(h)
    h = conv(filters, 3, padding="same", use_bias=False)(_norm_relu(h, groups))
    return keras.layers.Add()([h, x])


def _norm_relu(x, groups):
    x = keras.layers.GroupNormalization(groups=groups, epsilon=1e-5)(x)
    return keras.layers.Activation("relu")(x)
