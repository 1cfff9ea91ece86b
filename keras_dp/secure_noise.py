"""Gaussian noise from a cryptographic generator, against whoever attacks the generator itself.

Two attacks go past the mathematics of the Gaussian mechanism, to how a computer carries it out.

The first is on the random bits. Philox, which is the default, passes every statistical test, but
nobody has shown that seeing some of its output does not help to predict the rest. Here the bits
are those of AES in counter mode, with the run's secret as its key (NIST SP 800-38A): to predict
them is to break AES.

The second is on floating-point numbers. A sum of a gradient and a normal cannot take all values,
and which ones it can take depends on the gradient (Mironov 2012, "On significance of the least
significant bits for differential privacy"; Jin et al. 2022, arXiv 2112.05307). Two measures:

- each normal is the sum of four independent ones over two, in double precision, so that which
  bits led to a value cannot be found by going through them (Holohan and Braghin 2021, arXiv
  2107.10138, section 4);
- the noisy sum is made in double precision and rounded to a grid of about a millionth of the
  noise's standard deviation. Rounding is post-processing, and the bits in which gradients would
  show are no longer there.

Limits: it has not been proved that the two suffice for a product of many steps. Time and memory
traffic of the machine are not hidden. Nor does it help who reads the memory of the process.
"""

import math

import numpy as np
import tensorflow as tf

from keras_dp.noise import GaussianNoise

# Normals that each normal is made of; a square number, so that the root is exact.
_TERMS = 4
# The grid is the power of two at or below the standard deviation, times 2 to this power.
_GRID = -20


class SecureNoise(GaussianNoise):
    """The same as :class:`~keras_dp.noise.GaussianNoise`, from AES, in double precision.

    Drawn by the CPU, outside the graph: no XLA compiles it.

    Raises:
      ImportError: without the package ``cryptography``.
    """

    def __init__(self, seed=None):
        _require_cryptography()
        super().__init__(seed)

    def add(self, tensors, stddev):
        """The float32 ``tensors`` with noise, on a grid of ``stddev / 2**20`` or finer."""
        noise = self.draw([tuple(t.shape) for t in tensors], stddev)
        grid = 2.0 ** (math.floor(math.log2(stddev)) + _GRID)
        noisy = [tf.cast(t, tf.float64) + z for t, z in zip(tensors, noise)]
        return [tf.cast(tf.round(t / grid) * grid, tf.float32) for t in noisy]

    def _normals(self, number, count, stddev):
        words = tf.numpy_function(
            _aes_words, [self._secret, number, _TERMS * count], tf.uint64, stateful=False
        )
        words.set_shape([_TERMS * count])
        return tf.add_n([_box_muller(w, stddev) for w in tf.split(words, _TERMS)]) / _TERMS**0.5


def _aes_words(secret, number, count):
    """Words of 64 random bits: the key stream of AES-128-CTR, of which ``number`` names a part."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    # The upper half of the counter block names the stream, the lower half counts within it.
    start = int(number).to_bytes(8, "big", signed=True) + bytes(8)
    encryptor = Cipher(algorithms.AES(secret.tobytes()), modes.CTR(start)).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * int(count))), np.uint64)


def _box_muller(words, stddev):
    """As many float64 normals as there are words of 64 random bits; an even number."""
    # The upper 53 bits, which is what a double holds exactly.
    bits = tf.cast(tf.bitwise.right_shift(words, tf.constant(11, tf.uint64)), tf.float64)
    radius_bits, angle_bits = tf.split(bits, 2)
    radius = stddev * tf.sqrt(-2 * tf.math.log((radius_bits + 0.5) / 2**53))
    angle = angle_bits * (2 * math.pi / 2**53)
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)


def _require_cryptography():
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise ImportError(
            'noise_source="secure" takes its random bits from the package `cryptography`, which '
            'is not installed: run `pip install "keras_dp[secure]"`.'
        ) from error
