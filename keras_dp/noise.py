"""Gaussian noise: keys, streams, and where the randomness comes from.

A run has a secret of 128 bits, and every stream of noise has a number of its own, taken
from a counter that only ever grows. Secret and number select a stream of the Philox
generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"), so no two
variables, updates or runs share noise, and the noise of an update depends on nothing
else: not on the device, not on the number of replicas.

The secret lives in a variable that no checkpoint, config or log ever sees. Who knew it
could subtract the noise. The counter is not restored from a checkpoint either: an
optimizer whose weights are set back must not use the same noise a second time.
"""

import hashlib
import math
import os
import warnings

import numpy as np
import tensorflow as tf

from keras_dp.errors import PrivacyError

_PHILOX = 1

# Variables share a stream up to this many entries: fewer operations for small ones, and
# working memory that is bounded by the largest.
_STREAM = 1 << 20


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

    def add(self, tensors, stddev):
        """The float32 ``tensors``, each with fresh noise of that standard deviation added."""
        noise = self.draw([tuple(t.shape) for t in tensors], stddev)
        return [t + z for t, z in zip(tensors, noise)]

    @property
    def variables(self):
        """list of tf.Variable: the secret, and how much has been drawn."""
        return [self._secret, self._drawn]

    @property
    def fingerprint(self):
        """str: equal for sources that will draw the same. A hash, which shows no secret."""
        state = self._secret.numpy().tobytes() + self._drawn.numpy().tobytes()
        return hashlib.blake2b(state, digest_size=16, person=b"keras_dp noise").hexdigest()

    def draw(self, shapes, stddev):
        """One fresh float32 Gaussian tensor per shape, all independent, with mean 0.

        Args:
          shapes: list of fully defined shapes.
          stddev: the standard deviation of every entry.

        Returns:
          list of float32 tensors. The two normals of a pair are the Cartesian coordinates of
          a radius and an angle from 32 random bits each (Box and Muller 1958), so the tails
          end at 6.7 standard deviations, beyond which there is 1e-11 of a normal.
        """
        if os.getpid() != self._process:
            raise PrivacyError(
                "A DP optimizer was made in one process and used in a fork of it, where it would "
                "repeat the same noise. Make the optimizer in the process that trains."
            )
        sizes = [math.prod(shape) for shape in shapes]
        streams = _streams(sizes)
        first = self._drawn.assign_add(len(streams)) - len(streams)
        flat = []
        for number, members in enumerate(streams):
            lengths = [sizes[k] for k in members]
            odd = sum(lengths) % 2
            normals = self._normals(first + number, sum(lengths) + odd, stddev)
            flat += tf.split(normals, lengths + [1] * odd)[: len(lengths)]
        return [v if len(s) == 1 else tf.reshape(v, s) for v, s in zip(flat, shapes)]

    def _normals(self, number, count, stddev):
        """``count`` normals, an even number, of the stream with this number."""
        # A Philox counter has 128 bits: the low half counts within the stream, the high
        # half names it. Integer addition wraps around, so distinct numbers stay distinct.
        counter = tf.stack([tf.constant(0, tf.int64), self._secret[1] + number])
        bits = tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[count],
            key=tf.bitcast(self._secret[:1], tf.uint64),
            counter=tf.bitcast(counter, tf.uint64),
            alg=_PHILOX,
            dtype=tf.uint32,
        )
        return _box_muller(bits, stddev)

    def __deepcopy__(self, memo):
        return type(self)()

    def __reduce__(self):
        return type(self), ()

    def __repr__(self):
        return f"<{type(self).__name__}>"


def _streams(sizes):
    """The positions of ``sizes``, in order, as groups that share a stream."""
    groups, total = [], 0
    for k, size in enumerate(sizes):
        if not groups or total + size > _STREAM:
            groups.append([])
            total = 0
        groups[-1].append(k)
        total += size
    return groups


def _box_muller(bits, stddev):
    """As many normals as there are words of 32 random bits; an even number.

    Both normals of every pair are used: TensorFlow's own generator takes half as long again.
    """
    radius_bits, angle_bits = tf.split(tf.cast(bits, tf.float32), 2)
    uniform = (radius_bits + 0.5) / 2**32  # never 0
    # The logarithm of 1 might be rounded to the wrong side of 0.
    radius = stddev * tf.sqrt(tf.maximum(-2 * tf.math.log(uniform), 0.0))
    angle = angle_bits * (2 * math.pi / 2**32)
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
