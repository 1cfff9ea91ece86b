"""The wavelet scattering transform of images, and classifiers of what it gives.

Features that are fixed in advance cost no privacy. Tramer and Boneh 2021 (arXiv 2011.11660) show
that a linear model of them beats private convolutional networks at small epsilon.

The transform (Mallat 2012, arXiv 1101.2286; Bruna and Mallat 2013, arXiv 1203.1513) of an image x
is, with Gaussian averaging phi_J over 2^J pixels and Morlet wavelets psi of scale 2^j and L
angles,

    x * phi_J,    |x * psi_1| * phi_J,    ||x * psi_1| * psi_2| * phi_J    (j_1 < j_2),

each sampled every 2^J pixels: 1 + J L + J (J - 1) / 2 L^2 images. The choices that the papers leave
open are those of Kymatio (Andreux et al. 2020, arXiv 1812.11214), whose numbers it reproduces.
"""

import dataclasses
import functools

import keras
import numpy as np
import tensorflow as tf

from models.activations import activation_layer

_MAX_ALIASES = 2  # copies of a filter on either side that reach into the image by wrapping around


@dataclasses.dataclass(frozen=True)
class FilterBank:
    """The filters for images of one size.

    Attributes:
      scales: J. angles: L.
      size: (height, width) of an image; padding: pixels reflected on each side of it.
      wavelets: list over j of float32 ``[L, height, width]``, the Fourier transforms (real) of the
        wavelets of scale 2^j on the padded image.
      averaging: list over j of float32 matrices (rows, columns): ``rows @ u @ columns.T`` is
        u * phi_J at every 2^J-th pixel of the image, for u sampled every 2^j pixels.
    """

    scales: int
    angles: int
    size: tuple
    padding: tuple
    wavelets: list
    averaging: list

    @property
    def channels(self):
        """Number of images that one image becomes."""
        of_first = self.scales * self.angles
        return 1 + of_first + of_first * (self.scales - 1) * self.angles // 2


@functools.cache
def filter_bank(height, width, scales=2, angles=8):
    """Morlet wavelets and a Gaussian average for images of one size.

    A wavelet of scale 2^j and angle t is a wave of frequency 3 pi / 4 / 2^j under a Gaussian of
    width 0.8 2^j, which is L / 4 times longer along the wave's crests, less that part of the
    Gaussian that makes its sum zero.

    Args:
      height, width: of the images; multiples of 2^scales.
      scales: J.
      angles: L.

    Returns:
      FilterBank.

    Raises:
      ValueError: for a size that is no multiple of 2^scales, or is less than that.
    """
    step = 2**scales
    if height % step or width % step or height < step or width < step:
        raise ValueError(
            f"Height and width must be multiples of 2^scales = {step}, received {height} x {width} "
            f"and scales={scales}. Pad the images."
        )
    padded, padding = (height + 2 * step, width + 2 * step), (step, step)
    wavelets = []
    for j in range(scales):
        bank = []
        for k in range(angles):
            turn = (angles // 2 - 1 - k) * np.pi / angles
            bank.append(_morlet(padded, 0.8 * 2**j, turn, 0.75 * np.pi / 2**j, 4 / angles))
        wavelets.append(np.stack(bank).astype(np.float32))
    averaging = []
    for j in range(scales):
        # The Gaussian is the product of one along the rows and one along the columns.
        averaging.append(tuple(_averaging(size, scales, j).astype(np.float32) for size in padded))
    return FilterBank(scales, angles, (height, width), padding, wavelets, averaging)


def _gaussian_wave(shape, width, angle, frequency, slant):
    """``[height, width]``, complex: a wave under a Gaussian, wrapped around the borders."""
    reach = np.arange(-_MAX_ALIASES, _MAX_ALIASES + 1)
    y = (np.arange(shape[0])[None] + reach[:, None] * shape[0]).ravel()[:, None]
    x = (np.arange(shape[1])[None] + reach[:, None] * shape[1]).ravel()[None]
    along = np.cos(angle) * y + np.sin(angle) * x
    across = np.cos(angle) * x - np.sin(angle) * y
    envelope = np.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
    wave = envelope * np.exp(1j * frequency * along) * slant / (2 * np.pi * width**2)
    copies = len(reach)
    return wave.reshape(copies, shape[0], copies, shape[1]).sum((0, 2))


def _morlet(shape, width, angle, frequency, slant):
    """The Fourier transform of a wavelet; it is real, as the wavelet mirrored is its conjugate."""
    wave = _gaussian_wave(shape, width, angle, frequency, slant)
    envelope = _gaussian_wave(shape, width, angle, 0.0, slant)
    return np.fft.fft2(wave - wave.sum() / envelope.sum() * envelope).real


def _averaging(size, scales, j):
    """Matrix ``[size / 2^J - 2, size / 2^j]``: average, sample, leave the padding out."""
    width, count = 0.8 * 2 ** (scales - 1), size // 2**j
    places = np.arange(size) + size * np.arange(-_MAX_ALIASES, _MAX_ALIASES + 1)[:, None]
    gaussian = np.exp(-(places**2) / (2 * width**2)).sum(0) / np.sqrt(2 * np.pi * width**2)
    # For u sampled every 2^j pixels the Gaussian is sampled so too, and each sample stands for 2^j
    # pixels: its spectrum folds, by a sum.
    spectrum = np.fft.fft(gaussian).real.reshape(2**j, count).sum(0)
    kernel = np.fft.ifft(spectrum).real
    stride = 2 ** (scales - j)
    outputs = np.arange(1, count // stride - 1) * stride
    return kernel[(outputs[:, None] - np.arange(count)[None]) % count]


@keras.saving.register_keras_serializable(package="keras_dp_models")
class Scattering2D(keras.layers.Layer):
    """The scattering transform of images, without weights.

    ``[batch, height, width, channels]`` becomes ``[batch, height / 2^J, width / 2^J, channels *
    (1 + J L + J (J - 1) / 2 L^2)]``: 7 x 7 x 81 for grey images of 28 x 28. Of several input
    channels the coefficients of the first come first. Borders are reflected.

    Args:
      scales: J, int of at least 1.
      angles: L, an even int.
    """

    def __init__(self, scales=2, angles=8, **kwargs):
        super().__init__(**kwargs)
        self.scales, self.angles = scales, angles

    def call(self, inputs):
        """The coefficients of every image, each by itself."""
        bank = filter_bank(inputs.shape[1], inputs.shape[2], self.scales, self.angles)
        (rows, columns), channels = bank.padding, inputs.shape[3]
        images = tf.transpose(tf.cast(inputs, tf.float32), [0, 3, 1, 2])
        images = tf.pad(images, [[0, 0], [0, 0], [rows, rows], [columns, columns]], "REFLECT")
        spectrum = tf.signal.fft2d(tf.cast(images, tf.complex64))[:, :, None]
        orders = [[self._averaged(images[:, :, None], bank, 0)], [], []]
        for j in range(self.scales):
            first = self._modulus(spectrum, bank, j, 0)  # [batch, channels, L, ...]
            orders[1].append(self._averaged(first, bank, j))
            if j + 1 < self.scales:
                of_first = tf.signal.fft2d(tf.cast(first, tf.complex64))[:, :, :, None]
                finer = [self._modulus(of_first, bank, k, j) for k in range(j + 1, self.scales)]
                finer = [self._averaged(u, bank, k) for k, u in enumerate(finer, j + 1)]
                # [batch, channels, L, (scales, L), ...]: for each first wavelet, its second ones.
                orders[2].append(_merged(tf.concat(finer, 3), 2))
        found = tf.concat([part for order in orders for part in order], 2)
        height, width = found.shape[3:]
        found = tf.reshape(found, [-1, channels * bank.channels, height, width])
        return tf.cast(tf.transpose(found, [0, 2, 3, 1]), self.compute_dtype)

    def compute_output_shape(self, input_shape):
        """``[batch, height / 2^J, width / 2^J, channels * coefficients]``."""
        batch, height, width, channels = input_shape
        step, bank = 2**self.scales, filter_bank(height, width, self.scales, self.angles)
        return (batch, height // step, width // step, channels * bank.channels)

    def _modulus(self, spectrum, bank, j, sampled):
        """|u * psi_j| at every 2^j-th pixel, from the transform of u at every 2^sampled-th."""
        wavelets = tf.constant(4**sampled * _folded(bank.wavelets[j], 2**sampled), tf.complex64)
        return tf.abs(tf.signal.ifft2d(_folded(spectrum * wavelets, 2 ** (j - sampled))))

    def _averaged(self, u, bank, j):
        rows, columns = (tf.constant(matrix) for matrix in bank.averaging[j])
        return tf.matmul(rows, tf.matmul(u, columns, transpose_b=True))

    def get_config(self):
        """The arguments."""
        return super().get_config() | {"scales": self.scales, "angles": self.angles}


def _folded(spectrum, factor):
    """The transform of a signal at every ``factor``-th pixel, from that at all of them."""
    if factor == 1:
        return spectrum
    *lead, height, width = spectrum.shape
    lead = [-1 if n is None else n for n in lead]
    split = [*lead, factor, height // factor, factor, width // factor]
    reshape, mean = (np.reshape, np.mean) if isinstance(spectrum, np.ndarray) else (_reshape, _mean)
    return mean(reshape(spectrum, split), (len(lead), len(lead) + 2))


def _reshape(tensor, shape):
    return tf.reshape(tensor, shape)


def _mean(tensor, axes):
    return tf.reduce_mean(tensor, axes)


def _merged(tensor, axis):
    """Two neighbouring axes as one."""
    shape = tensor.shape.as_list()
    shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    return tf.reshape(tensor, [-1 if n is None else n for n in shape])


def scattering_features(images, scales=2, angles=8, batch_size=256, verbose=0):
    """The scattering transform of a whole data set, in batches, to be kept and trained on.

    Args:
      images: array ``[examples, height, width, channels]``.
      scales, angles: J and L.
      batch_size: images at a time.
      verbose: 1 shows a progress bar.

    Returns:
      float32 array ``[examples, height / 2^J, width / 2^J, coefficients]``.
    """
    layer = Scattering2D(scales, angles)
    transform = tf.function(layer, reduce_retracing=True)
    shape = layer.compute_output_shape(images.shape)
    found = np.empty(shape, np.float32)
    progress = keras.utils.Progbar(len(images), verbose=verbose, unit_name="image")
    for start in range(0, len(images), batch_size):
        part = slice(start, min(start + batch_size, len(images)))
        found[part] = transform(tf.constant(images[part], tf.float32))
        progress.update(part.stop)
    return found


def normalized_linear(input_shape=(7, 7, 81), num_classes=10, name="normalized_linear"):
    """A linear classifier of scattering features that are brought to one scale.

    Each channel of each example is centred and scaled to variance 1, and the whole to length 1. It
    looks at one example only, so it costs no privacy; normalisation by statistics of the data set,
    which Tramer and Boneh do with noise, would. All examples then have gradients of one size. The
    weights start at zero.

    Args:
      input_shape: shape of the features, channels last.
      num_classes: number of logits.
      name: the model's name.

    Returns:
      A ``keras.Model`` from features to logits; 39,700 parameters for 7x7x81 and ten classes.
    """
    layers = keras.layers
    inputs = keras.Input(input_shape)
    x = layers.GroupNormalization(input_shape[-1], epsilon=1e-5, center=False, scale=False)(inputs)
    x = layers.UnitNormalization()(layers.Flatten()(x))
    logits = layers.Dense(num_classes, kernel_initializer="zeros", name="logits")
    return keras.Model(inputs, logits(x), name=name)


def scattering_cnn(
    input_shape=(7, 7, 81), num_classes=10, groups=27, activation="tanh", name="scattering_cnn"
):
    """The small convolutional network of Tramer and Boneh 2021 over scattering features.

    Group normalisation without weights, convolutions of 16 filters (3x3, stride 2) and 32 (3x3),
    and 32 hidden units (arXiv 2011.11660). 33,066 parameters for 7x7x81 and ten classes.

    Args:
      input_shape: shape of the features, channels last.
      num_classes: number of logits.
      groups: groups of channels that are normalised together, or None for no normalisation.
      activation: of the convolutions and the hidden layer, as in ``models.cnn``.
      name: the model's name.

    Returns:
      A ``keras.Model`` from features to logits ``[batch, num_classes]``.
    """
    layers = keras.layers
    inputs = x = keras.Input(input_shape)
    if groups is not None:
        x = layers.GroupNormalization(groups, epsilon=1e-5, center=False, scale=False)(x)
    for number, (filters, stride) in enumerate(((16, 2), (32, 1)), 1):
        x = layers.Conv2D(filters, 3, stride, padding="same", name=f"conv{number}")(x)
        x = activation_layer(activation, f"activation{number}")(x)
    x = layers.Dense(32, name="hidden")(layers.Flatten()(x))
    x = activation_layer(activation, "hidden_activation")(x)
    return keras.Model(inputs, layers.Dense(num_classes, name="logits")(x), name=name)
