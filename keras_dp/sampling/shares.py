"""Which part of every draw a worker delivers, and how its rows lie for its replicas."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Share:
    """One worker's part in the draws of several.

    Each worker draws, with random numbers of its own, from the units whose number is its own
    modulo the number of workers, each with the same probability q. Each unit belongs to exactly
    one worker, and all are drawn independently: together they are one Poisson draw of all units.

    Attributes:
      worker: int, of this worker.
      workers: int, how many there are.
      replicas: int, between how many replicas this worker's rows are split, in equal parts.
    """

    worker: int = 0
    workers: int = 1
    replicas: int = 1

    def size(self, units):
        """int, how many of ``units`` are this worker's."""
        return len(range(self.worker, units, self.workers))

    def largest(self, units):
        """int, the most units that a worker has."""
        return -(-units // self.workers)

    def units(self, indices):
        """The units with these numbers among those of this worker."""
        return indices * self.workers + self.worker

    def room(self, units):
        """int, the least that is not below ``units`` and splits evenly between the replicas."""
        return self.replicas * -(-units // self.replicas)

    def spread(self, units, size):
        """Rows of ``units``, int64 ``[n, k]``, laid out so that replicas get equally many.

        Args:
          units: n <= size of them.
          size: int, a multiple of ``replicas``.

        Returns:
          int64 ``[size, k]``, -1 for padding; ``units`` themselves for one replica.
        """
        if self.replicas == 1:
            return units
        rows = np.full((size, units.shape[1]), -1, np.int64)
        rows[: len(units)] = units
        by_replica = rows.reshape(size // self.replicas, self.replicas, -1).swapaxes(0, 1)
        return by_replica.reshape(size, -1)
