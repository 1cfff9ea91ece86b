"""What the chief of several workers spends, as all of them follow it.

All workers make the same updates. So one of them, the chief, has the ledger, and the others ask:
whether the next updates may be made, and what was spent. They ask at the same update, since what
they decide by, the optimizer's counter and the chief's last answer, is the same everywhere.
"""

from keras_dp.distribution import cluster
from keras_dp.errors import PrivacyError


class SharedSpending:
    """The part of ``Spending`` that callbacks use, on each of several workers.

    Args:
      strategy: the ``tf.distribute.Strategy`` of the workers.
      optimizer: DP optimizer.
      phase: ``Phase`` of the updates to come.
      find: function without arguments that gives the chief's ``Spending``.
    """

    closed = False

    def __init__(self, strategy, optimizer, phase, find):
        self.phase, self._strategy, self._optimizer = phase, strategy, optimizer
        self._chiefs, self._granted = None, {}  # by the limit that allowed it
        cluster.from_chief(strategy, lambda: self._take(find()))

    def _take(self, spending):
        self._chiefs = spending

    @property
    def made(self):
        """int, updates that led to the present weights."""
        return self.read() if self._chiefs is None else self._chiefs.made

    def read(self):
        """As ``Spending.read``."""
        return self._optimizer.position[1] if self._chiefs is None else self._chiefs.read()

    def reserved(self, within=None):
        """int, number of the last update that may be made without asking the chief again."""
        return self._granted.get(within, -1)

    def reserve(self, stop, within=None):
        """As ``Spending.reserve``: what the chief says."""
        if stop > self.reserved(within):
            granted = cluster.from_chief(self._strategy, lambda: self._grant(stop, within))
            if granted < stop:
                return False
            self._granted[within] = granted
        elif self._chiefs is not None and not self._chiefs.reserve(stop, within):
            raise PrivacyError(
                f"The workers were allowed the updates up to number {self.reserved(within)}, but "
                "another training on the same ledger has used them up since a checkpoint was "
                "restored within the epoch. Start all workers again."
            )
        return True

    def _grant(self, stop, within):
        return self._chiefs.reserved(within) if self._chiefs.reserve(stop, within) else -1

    def updates_left(self, within, most=10**12):
        """As ``Spending.updates_left``, by the chief's ledger."""
        return cluster.from_chief(self._strategy, lambda: self._chiefs.updates_left(within, most))

    def news(self):
        """As ``Spending.news``; for the chief alone."""
        return "" if self._chiefs is None else self._chiefs.news()

    def begin_epoch(self):
        """As ``Spending.begin_epoch``."""
        cluster.from_chief(self._strategy, lambda: self._chiefs.begin_epoch())

    def end_epoch(self):
        """As ``Spending.end_epoch``; does nothing but on the chief, which need not be heard."""
        if self._chiefs is not None:
            self._chiefs.end_epoch()
