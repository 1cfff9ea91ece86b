"""A small convolutional network for grey images, as in the first DP-SGD tutorials."""

import keras


def cnn(input_shape=(28, 28, 1), num_classes=10, activation="relu", name="cnn"):
    """The two-convolution network on which DP-SGD is usually shown.

    A convolution of 16 filters (8x8, stride 2, same), one of 32 filters (4x4, stride 2, valid),
    each followed by a 2x2 max-pooling of stride 1, then 32 hidden units. At 28x28x1 and ten
    classes it has 26,010 parameters.

    Args:
      input_shape: ``(height, width, channels)``.
      num_classes: number of logits.
      activation: of the convolutions and the hidden layer. ``"tanh"`` is the bounded activation
        that Papernot et al. 2020 (Tempered Sigmoid Activations, arXiv 2007.14191) found better
        than ``"relu"`` under DP-SGD.
      name: the model's name.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``.
    """
    layers = keras.layers
    inputs = x = keras.Input(input_shape)
    x = layers.Conv2D(16, 8, 2, padding="same", activation=activation, name="conv1")(x)
    x = layers.MaxPooling2D(2, 1)(x)
    x = layers.Conv2D(32, 4, 2, padding="valid", activation=activation, name="conv2")(x)
    x = layers.MaxPooling2D(2, 1)(x)
    x = layers.Flatten()(x)
    x = layers.Dense(32, activation=activation, name="hidden")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
