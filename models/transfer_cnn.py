"""A convolutional network made to be pretrained on public data and fine-tuned privately."""

import keras


def transfer_cnn(
    input_shape=(28, 28, 1),
    num_classes=10,
    filters=(32, 64, 64),
    features=128,
    activation="relu",
    name="transfer_cnn",
):
    """Convolutions, a layer of features that is brought to a fixed norm, and logits.

    The features of every example have the same norm, 8. So for the logits' kernel and bias the
    gradient of the cross entropy of any example has a norm of at most sqrt(8^2 + 1) * sqrt(2), in
    proportion to how wrong the prediction is and to nothing else, and clipping is even-handed.
    Fixing the norm looks at one example only, unlike whitening the features: it costs no privacy.

    Args:
      input_shape: ``(height, width, channels)``.
      num_classes: number of logits.
      filters: of the three convolutions: 5x5 of stride 2, 3x3 of stride 2, 3x3.
      features: units of the layer before the logits.
      activation: of the convolutions and the features.
      name: the model's name.

    Returns:
      A ``keras.Model`` from images to logits ``[batch, num_classes]``. The layers of weights are
      called conv1, conv2, conv3, features and logits.
    """
    layers = keras.layers
    inputs = x = keras.Input(input_shape)
    for number, (kernel, stride) in enumerate(((5, 2), (3, 2), (3, 1))):
        x = layers.Conv2D(
            filters[number],
            kernel,
            stride,
            padding="same",
            activation=activation,
            name=f"conv{number + 1}",
        )(x)
    x = layers.Flatten()(x)
    x = layers.Dense(features, activation=activation, name="features")(x)
    x = layers.Rescaling(8.0)(layers.UnitNormalization()(x))
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
