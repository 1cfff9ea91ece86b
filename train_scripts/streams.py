"""Reading a data set in the order of a shuffle, or as it is, by several threads."""

import collections
import concurrent.futures

import numpy as np


class Shuffled:
    """A stream of examples, each once, in a new order at each iteration.

    For ``keras_dp.FixedBatches``: its examples are what ``map_fn`` makes of those of a sequence.

    Args:
      examples: sequence, read by several threads.
      map_fn: function of an example, or of an example and ``rng``, a ``numpy.random.Generator``.
      seed: of the order and of ``rng``. The order is not what protects: without amplification the
        guarantee holds for any.
      threads: int, how many read.
      random: whether ``map_fn`` takes ``rng``.
    """

    def __init__(self, examples, map_fn, seed, threads, random):
        self._examples, self._map_fn = examples, map_fn
        self._seeds = np.random.SeedSequence(seed)
        self._threads, self._random = threads, random

    def __iter__(self):
        (seed,) = self._seeds.spawn(1)
        order = np.random.default_rng(seed).permutation(len(self._examples)).tolist()
        generators = map(np.random.default_rng, seed.spawn(len(order))) if self._random else None
        yield from mapped(self._read, order, self._threads, generators)

    def _read(self, index, *rng):
        return self._map_fn(self._examples[index], *rng)


def mapped(function, items, threads, *more):
    """``map(function, items, *more)`` by threads, in order, a few results ahead of the reader.

    Args:
      function: what is called.
      items, more: iterables of its arguments; None is left out.
      threads: int, how many call.
    """
    arguments = zip(items, *(m for m in more if m is not None))
    waiting = collections.deque()
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        try:
            for args in arguments:
                waiting.append(pool.submit(function, *args))
                if len(waiting) > 4 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
