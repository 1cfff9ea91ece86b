"""Wide ResNets for small images, with group normalisation."""

import keras

from models.convolutions import Layers


def wide_resnet(
    input_shape=(32, 32, 3),
    num_classes=10,
    depth=16,
    width=4,
    norm="group",
    groups=16,
    weight_standardization=False,
    name=None,
):
    """A WideResNet (Zagoruyko and Komodakis 2016, arXiv 1605.07146) with group normalisation.

    De et al. 2022 (arXiv 2204.13650) train WRN-16-4 and WRN-40-4 privately on CIFAR-10 with group
    normalisation of 16 groups in the place of batch normalisation, and with weight
    standardisation: ``weight_standardization=True``.

    Args:
      input_shape: ``(height, width, channels)``.
      num_classes: number of logits.
      depth: 6 n + 4, where n is the number of blocks in each of the three stages.
      width: factor on the 16, 32 and 64 channels of the three stages.
      norm: ``"group"`` or ``"layer"``.
      groups: groups of channels that are normalised together.
      weight_standardization: whether kernels are standardised, see ``StandardizedConv2D``.
      name: the model's name; ``"wrn<depth>_<width>"`` by default.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``.

    Raises:
      ValueError: for a depth that is not 6 n + 4, or another norm.
    """
    if depth < 10 or (depth - 4) % 6:
        raise ValueError(f"depth must be 6 n + 4 (10, 16, 22, 28, ...), received {depth!r}.")
    make = Layers(norm, groups, weight_standardization)
    inputs = keras.Input(input_shape)
    x = make.conv(inputs, 16, 3, name="stem_conv")
    for stage in range(3):
        for block in range((depth - 4) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            label = f"stage{stage + 1}_block{block + 1}"
            x = _block(make, x, 16 * width * 2**stage, stride, label)
    x = make.activate(make.norm(x, "norm"), "activation")
    x = keras.layers.GlobalAveragePooling2D(name="mean")(x)
    logits = keras.layers.Dense(num_classes, name="logits")(x)
    return keras.Model(inputs, logits, name=name or f"wrn{depth}_{width}")


def _block(make, x, filters, stride, label):
    """Norm, activation and convolution twice; the shortcut changes shape where it must."""
    h = make.activate(make.norm(x, f"{label}_norm1"), f"{label}_activation1")
    if stride != 1 or x.shape[-1] != filters:
        x = make.conv(h, filters, 1, stride, f"{label}_shortcut")
    h = make.conv(h, filters, 3, stride, f"{label}_conv1")
    h = make.activate(make.norm(h, f"{label}_norm2"), f"{label}_activation2")
    h = make.conv(h, filters, 3, name=f"{label}_conv2")
    return keras.layers.Add(name=f"{label}_sum")([h, x])
