"""Bounded activations for private training."""

import keras
from keras import ops


@keras.saving.register_keras_serializable(package="keras_dp_models")
class TemperedSigmoid(keras.layers.Layer):
    """The activation ``scale * sigmoid(inverse_temperature * x) - offset``.

    Papernot et al. 2020 (Tempered Sigmoid Activations, arXiv 2007.14191, section 3): a bounded
    activation keeps gradients from growing during training, so that clipping takes less of them
    away. With scale 2, inverse temperature 2 and offset 1, the defaults, it is the hyperbolic
    tangent, which they found near the best.

    Args:
      scale: float above 0, the width of the range of values.
      inverse_temperature: float above 0, the slope.
      offset: float, what is subtracted.

    Raises:
      ValueError: for a scale or an inverse temperature that is not above 0.
    """

    def __init__(self, scale=2.0, inverse_temperature=2.0, offset=1.0, **kwargs):
        super().__init__(**kwargs)
        for name, value in (("scale", scale), ("inverse_temperature", inverse_temperature)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0, received {value!r}.")
        self.scale, self.inverse_temperature, self.offset = scale, inverse_temperature, offset

    def call(self, inputs):
        """The activation of every number."""
        return self.scale * ops.sigmoid(self.inverse_temperature * inputs) - self.offset

    def get_config(self):
        """The arguments."""
        return super().get_config() | {
            "scale": self.scale,
            "inverse_temperature": self.inverse_temperature,
            "offset": self.offset,
        }


def activation_layer(activation, name=None):
    """A layer that applies an activation.

    Args:
      activation: a name that Keras knows, ``"tempered_sigmoid"``, or a dict of the arguments of
        :class:`TemperedSigmoid`.
      name: the layer's name.

    Returns:
      ``keras.layers.Layer``.
    """
    if activation == "tempered_sigmoid":
        return TemperedSigmoid(name=name)
    if isinstance(activation, dict):
        return TemperedSigmoid(**activation, name=name)
    return keras.layers.Activation(activation, name=name)
