"""Gaussian noise: keys, streams, and where the randomness comes from.

A run has a secret of 128 bits, and every tensor of noise has a number of its own, taken
from a counter that only ever grows. Secret and number select a stream of the Philox
generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so no two
variables, updates or runs share noise, and the noise of an update depends on nothing
else: not on the device, not on the number of replicas.

The secret lives in a variable that no checkpoint, config or log ever sees. Who knew it
could subtract the noise. The counter is not restored from a checkpoint either: an
optimizer whose weights are set back must not use the same noise a second time.
"""

import hashlib
import os
import warnings

import numpy as np
import tensorflow as tf

from keras_dp.errors import PrivacyError

_PHILOX = 1


class GaussianNoise:
    """A source of independent standard normal tensors.

    Not trackable and not copyable on purpose: a copy is a new source with a new secret.

    Args:
      seed: None takes 128 bits from the operating system. An int makes the noise
        repeatable, and thereby worthless as protection: for tests only.
    """

    def __init__(self, seed=None):
        if seed is None:
            secret = os.urandom(16)
        else:
            warnings.warn(
                f"keras_dp: seed={seed} fixes the noise. Whoever knows the seed can subtract it: "
                "the run is NOT private. Use seed=None (the default) for anything but tests.",
                stacklevel=4,
            )
            secret = hashlib.sha256(f"keras_dp noise {seed}".encode()).digest()[:16]
        with tf.init_scope():
            self._secret = tf.Variable(
                np.frombuffer(secret, np.int64), trainable=False, name="noise"
            )
            self._drawn = tf.Variable(0, dtype=tf.int64, trainable=False, name="noise_drawn")
        self._process = os.getpid()

    def draw(self, shapes):
        """One fresh standard normal float32 tensor per shape, all independent.

        Args:
          shapes: list of fully defined shapes.

        Returns:
          list of float32 tensors. TensorFlow's Philox normals come from 23-bit uniforms
          by the Box-Muller transform, so their tails end near 5.7 standard deviations.
        """
        if os.getpid() != self._process:
            raise PrivacyError(
                "A DP optimizer was made in one process and used in a fork of it, where it would "
                "repeat the same noise. Make the optimizer in the process that trains."
            )
        first = self._drawn.assign_add(len(shapes)) - len(shapes)
        key = tf.bitcast(self._secret[:1], tf.uint64)
        return [self._stream(key, first + k, shape) for k, shape in enumerate(shapes)]

    def _stream(self, key, number, shape):
        # A Philox counter has 128 bits: the low half counts within the stream, the high
        # half names it. Integer addition wraps around, so distinct numbers stay distinct.
        counter = tf.stack([tf.constant(0, tf.int64), self._secret[1] + number])
        return tf.raw_ops.StatelessRandomNormalV2(
            shape=tf.constant(tuple(shape), tf.int32),
            key=key,
            counter=tf.bitcast(counter, tf.uint64),
            alg=_PHILOX,
            dtype=tf.float32,
        )

    def __deepcopy__(self, memo):
        return GaussianNoise()

    def __reduce__(self):
        return GaussianNoise, ()

    def __repr__(self):
        return "<GaussianNoise>"
