"""A multilayer perceptron."""

import keras


def mlp(
    input_shape=(784,), num_classes=10, hidden_units=(1024, 1024), activation="relu", name="mlp"
):
    """Fully connected layers from (flattened) inputs to logits.

    Args:
      input_shape: shape of one example; more than one axis is flattened.
      num_classes: number of logits.
      hidden_units: width of each hidden layer.
      activation: of the hidden layers.
      name: the model's name.

    Returns:
      A ``keras.Model`` with outputs ``[batch, num_classes]``.
    """
    layers = keras.layers
    inputs = x = keras.Input(input_shape)
    if len(input_shape) > 1:
        x = layers.Flatten()(x)
    for number, units in enumerate(hidden_units, 1):
        x = layers.Dense(units, activation=activation, name=f"hidden{number}")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
