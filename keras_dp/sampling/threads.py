"""Work on the examples of a batch in several threads."""

import concurrent.futures
import os

from keras_dp.sampling.checks import checked_int
from keras_dp.sampling.draws import Process


class Threads:
    """A pool of threads that are started when they are first needed, in each process anew.

    Args:
      number: int >= 1, or None for one thread for each CPU, at most 16.
    """

    def __init__(self, number=None):
        if number is None:
            number = min(os.cpu_count() or 1, 16)
        self._number = checked_int(number, "threads", 1)
        self._pool = None

    def run(self, work, length):
        """Calls `work` with slices that cover `range(length)`; raises what one of them raises."""
        size = max(1, -(-length // (2 * self._number)))
        slices = [slice(start, min(start + size, length)) for start in range(0, length, size)]
        if self._number == 1 or len(slices) == 1:
            list(map(work, slices))
        else:
            list(self._threads().map(work, slices))

    def _threads(self):
        # Threads do not survive a fork.
        if self._pool is None or self._pool[0] is not Process.current:
            pool = concurrent.futures.ThreadPoolExecutor(self._number, "keras_dp_examples")
            self._pool = (Process.current, pool)
        return self._pool[1]

    def __getstate__(self):
        return self.__dict__ | {"_pool": None}
