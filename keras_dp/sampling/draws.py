"""Poisson draws: which of N take part, and the random numbers that decide it."""

import hashlib
import math
import os
import threading
from collections import Counter

import numpy as np
from scipy.stats import binom

# At most one draw in a billion exceeds the default capacity.
OVERFLOW_PROBABILITY = 1e-9


def poisson_indices(generator, num_units, probability):
    """Draws each of `num_units` independently with the same probability.

    The gaps between the chosen ones of such a draw are independent and geometric. Drawing
    the gaps instead of one coin for each gives the same law at the cost of the chosen alone,
    and gives them in rising order, as files on disk like to be read. (Devroye 1986,
    "Non-Uniform Random Variate Generation", section X.4, waiting times.)

    Args:
      generator: `numpy.random.Generator`.
      num_units: int >= 0.
      probability: float in (0, 1].

    Returns:
      int64 array `[size]` of distinct indices below `num_units`, rising;
      `size` follows Binomial(num_units, probability) and may be 0.
    """
    if num_units == 0:
        return np.zeros(0, np.int64)
    mean = num_units * probability
    block = math.ceil(mean + 6 * math.sqrt(mean * (1 - probability)) + 8)
    indices = np.cumsum(generator.geometric(probability, block)) - 1
    while indices[-1] < num_units:
        more = np.cumsum(generator.geometric(probability, block)) + indices[-1]
        indices = np.concatenate([indices, more])
    return indices[: np.searchsorted(indices, num_units)]


def default_capacity(num_units, probability):
    """What holds all draws but one in a billion: a multiple of 8, at most `num_units`."""
    quantile = int(binom.isf(OVERFLOW_PROBABILITY, num_units, probability))
    return min(-(-max(quantile, 1) // 8) * 8, num_units)


class Process:
    """Stands for this process: a forked child gets an instance of its own."""

    current = object()

    @classmethod
    def renew(cls):
        """Called in a forked child."""
        cls.current = object()


# A process id would not do: ids are used again, and each container has its own.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=Process.renew)


class Draw:
    """The random numbers of one draw.

    The generators are Philox with key = secret and counter = (position, round, index) in its
    upper words, where the round of an index is how often it was asked for before. So the draws
    of different indices, or of the same index at different times, come from disjoint parts of
    one counter space, whoever asks and in whatever order: no two share a random number.

    Attributes:
      number: int, different for every draw of every sampler.
      generator: `numpy.random.Generator` that decides who takes part.
    """

    def __init__(self, secrets, round_of_index, index, number):
        self.number = number
        self._secrets, self._counter = secrets, (round_of_index, index)
        self.generator = self._generator(secrets[0], 0)

    def example_generator(self, position):
        """The `numpy.random.Generator` of the example that is the `position`-th of the draw."""
        return self._generator(self._secrets[1], position)

    def _generator(self, secret, position):
        # The lowest word of the counter is the one that the generator itself advances.
        philox = np.random.Philox(key=secret, counter=[0, position, *self._counter])
        return np.random.Generator(philox)


class Draws:
    """A secret, and draws that are a pure function of it."""

    def __init__(self, seed=None):
        secret = os.urandom(32) if seed is None else str(seed).encode()
        self._secrets = tuple(_derived(secret, purpose) for purpose in (b"sampler", b"examples"))
        self._rounds = Counter()
        self._lock = threading.Lock()
        self._first_number = int.from_bytes(os.urandom(7), "little")
        self.process = Process.current
        self.count = 0

    def of_worker(self, number):
        """Draws of one of several workers, independent of the others' even with one seed."""
        draws = Draws()
        secrets = tuple(secret.to_bytes(16, "little") for secret in self._secrets)
        worker = number.to_bytes(8, "little")
        draws._secrets = tuple(_derived(secret + worker, b"worker") for secret in secrets)
        draws.count = self.count
        return draws

    def next(self, index):
        """The next `Draw` for this index."""
        with self._lock:
            round_of_index = self._rounds[index]
            self._rounds[index] += 1
            number = self._first_number + self.count
            self.count += 1
        return Draw(self._secrets, round_of_index, index, number)


def _derived(secret, purpose):
    # The labels keep these streams apart, and from any other that is built on the same seed.
    person = b"keras_dp " + purpose[:7]
    return int.from_bytes(hashlib.blake2b(secret, digest_size=16, person=person).digest(), "little")
