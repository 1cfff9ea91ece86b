"""Small convolutional networks, as private training is usually shown with."""

import keras

from models.activations import activation_layer


def cnn(input_shape=(28, 28, 1), num_classes=10, activation="relu", name="cnn"):
    """The two-convolution network on which DP-SGD is usually shown.

    A convolution of 16 filters (8x8, stride 2, same), one of 32 filters (4x4, stride 2, valid),
    each followed by a 2x2 max-pooling of stride 1, then 32 hidden units. At 28x28x1 and ten
    classes it has 26,010 parameters (Papernot et al. 2020, arXiv 2007.14191, table 1).

    Args:
      input_shape: ``(height, width, channels)``.
      num_classes: number of logits.
      activation: of the convolutions and the hidden layer: a name that Keras knows, or
        ``"tempered_sigmoid"``, or a dict of the arguments of ``TemperedSigmoid``. Papernot et al.
        found bounded ones, of which ``"tanh"`` is one, better than ``"relu"`` under DP-SGD.
      name: the model's name.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``.
    """
    layers = keras.layers
    inputs = x = keras.Input(input_shape)
    x = layers.Conv2D(16, 8, 2, padding="same", name="conv1")(x)
    x = layers.MaxPooling2D(2, 1)(activation_layer(activation, "activation1")(x))
    x = layers.Conv2D(32, 4, 2, padding="valid", name="conv2")(x)
    x = layers.MaxPooling2D(2, 1)(activation_layer(activation, "activation2")(x))
    x = layers.Dense(32, name="hidden")(layers.Flatten()(x))
    x = activation_layer(activation, "hidden_activation")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)


def deep_cnn(input_shape=(32, 32, 3), num_classes=10, activation="tanh", name="deep_cnn"):
    """The six-convolution network on which private training is shown for CIFAR-10.

    Three times two 3x3 convolutions, of 32, 64 and 128 filters, and a 2x2 max-pooling of stride 2;
    then 128 hidden units. At 32x32x3 and ten classes it has 550,570 parameters (Tramer and Boneh
    2021, arXiv 2011.11660, after Papernot et al. 2020, arXiv 2007.14191, table 2).

    Args:
      input_shape, num_classes, activation, name: as in :func:`cnn`.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``.
    """
    layers = keras.layers
    inputs = x = keras.Input(input_shape)
    for stage, filters in enumerate((32, 64, 128), 1):
        for number in (1, 2):
            label = f"stage{stage}_conv{number}"
            x = layers.Conv2D(filters, 3, padding="same", name=label)(x)
            x = activation_layer(activation, f"stage{stage}_activation{number}")(x)
        x = layers.MaxPooling2D(2, 2, name=f"stage{stage}_pool")(x)
    x = layers.Dense(128, name="hidden")(layers.Flatten()(x))
    x = activation_layer(activation, "hidden_activation")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
