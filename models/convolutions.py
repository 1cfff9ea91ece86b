"""What the residual networks are made of: convolutions and normalisation of one example."""

import keras
from keras import ops

NORMS = ("group", "layer")


@keras.saving.register_keras_serializable(package="keras_dp_models")
class StandardizedConv2D(keras.layers.Conv2D):
    """A 2-D convolution whose kernel is standardised whenever it is used.

    With w the weights of one filter, n of them, it convolves with

        gain * (w - mean(w)) / sqrt(max(n * var(w), epsilon)),

    so that each filter has mean 0 and, up to its learned gain, norm 1 (weight standardisation, Qiao
    et al. 2019, arXiv 1903.10520; scaled by the fan-in as Brock et al. 2021, arXiv 2101.08692,
    section 3). De et al. 2022 (arXiv 2204.13650, section 3.1) use it with group normalisation to
    train privately. It reads weights only, so examples stay apart.

    Args:
      epsilon: least n * var(w) to divide by.
      Every other argument is that of ``keras.layers.Conv2D``.
    """

    def __init__(self, *args, epsilon=1e-4, **kwargs):
        super().__init__(*args, **kwargs)
        self.epsilon = epsilon

    def build(self, input_shape):
        """Makes kernel, bias and the gain ``[filters]``."""
        super().build(input_shape)
        self.gain = self.add_weight(name="gain", shape=(self.filters,), initializer="ones")

    def convolution_op(self, inputs, kernel):
        """The convolution with the standardised kernel."""
        return super().convolution_op(inputs, self.standardized(kernel))

    def standardized(self, kernel):
        """The kernel that is convolved with, of the shape of ``kernel``."""
        kernel = ops.cast(kernel, self.compute_dtype)
        mean = ops.mean(kernel, axis=(0, 1, 2), keepdims=True)
        centred = kernel - mean
        squares = ops.sum(ops.square(centred), axis=(0, 1, 2), keepdims=True)
        gain = ops.cast(self.gain, self.compute_dtype)
        return centred * (gain * ops.rsqrt(ops.maximum(squares, self.epsilon)))

    def get_config(self):
        """The arguments."""
        return super().get_config() | {"epsilon": self.epsilon}


class Layers:
    """Makes the convolutions and normalisations of one network, all of one kind.

    Args:
      norm: "group" for group normalisation (Wu and He 2018, arXiv 1803.08494), "layer" for layer
        normalisation over the channels of each position (Ba et al. 2016, arXiv 1607.06450).
        Neither looks at another example, as batch normalisation does.
      groups: groups of channels that "group" normalises together.
      weight_standardization: whether convolutions are :class:`StandardizedConv2D`.
      activation: name of the activation.

    Raises:
      ValueError: for another norm.
    """

    def __init__(self, norm="group", groups=16, weight_standardization=False, activation="relu"):
        if norm not in NORMS:
            raise ValueError(f'norm must be "group" or "layer", received {norm!r}.')
        self._norm, self._groups, self._activation = norm, groups, activation
        self._conv = StandardizedConv2D if weight_standardization else keras.layers.Conv2D

    def conv(self, x, filters, kernel, stride=1, name=None):
        """A convolution without bias, padded to ``ceil(size / stride)`` positions."""
        return self._conv(filters, kernel, stride, padding="same", use_bias=False, name=name)(x)

    def norm(self, x, name=None):
        """A normalisation with learned scale and offset."""
        if self._norm == "layer":
            return keras.layers.LayerNormalization(epsilon=1e-5, name=name)(x)
        if x.shape[-1] % self._groups:
            raise ValueError(
                f"groups must divide the number of channels, received groups={self._groups} for "
                f"{x.shape[-1]} channels."
            )
        return keras.layers.GroupNormalization(self._groups, epsilon=1e-5, name=name)(x)

    def activate(self, x, name=None):
        """The activation."""
        return keras.layers.Activation(self._activation, name=name)(x)
