"""Batches that have to be read from front to back."""

import threading


class InOrder:
    """One reading of batches that come in one order, whatever index Keras asks for.

    Keras looks at the first batches before it trains, shuffles the indices of an epoch, and may go
    on with the next epoch where it stopped. None of this can be told from an index. But each of
    its readers asks for `num_batches` before it reads, and then once for every batch: so that is
    where `begin` has to be called.

    Args:
      batches: function without arguments that gives a new iterator over batches.
    """

    def __init__(self, batches):
        self._batches = batches
        self._reading, self._lock = None, threading.Lock()

    def begin(self):
        """The next batch is the first of a new reading."""
        with self._lock:
            self._reading = None

    def next(self):
        """The next batch of this reading."""
        with self._lock:
            if self._reading is None:
                self._reading = self._batches()
            try:
                return next(self._reading)
            except BaseException:
                self._reading = None  # a generator that raised has ended
                raise


def refuse_workers(name, reason, workers=1, use_multiprocessing=False, **kwargs):
    """Refuses parallel readers, which would change the order."""
    if workers > 1 or use_multiprocessing:
        raise ValueError(
            f"{name} {reason}, so only one reader may ask for them. Received: workers={workers}, "
            f"use_multiprocessing={use_multiprocessing}. Leave both out: reading runs beside the "
            "training step anyway."
        )
