"""What one optimizer spends, written to the ledger before it is spent."""

import atexit
import contextlib
import dataclasses
import os
import secrets
import time
import weakref

from keras_dp.accounting.ledger import Entry
from keras_dp.errors import PrivacyError

# While training runs, updates are reserved about once in this time: a crash then overstates the
# updates by those of about as much time.
_SECONDS_PER_RESERVATION = 1.0


def spending(ledger, optimizer, phase, passes):
    """The spending of ``optimizer`` on ``ledger``: the same for all who ask with equal settings.

    With other settings, a new stretch begins at the update that the optimizer has reached.

    Args:
      ledger: ``PrivacyLedger``.
      optimizer: DP optimizer.
      phase: ``Phase`` without updates: the settings of those to come.
      passes: :class:`~keras_dp.callbacks.accumulated.Passes`, by which passes are counted.

    Returns:
      :class:`Spending`.

    Raises:
      LedgerError: settings that the ledger cannot hold.
    """
    book, current = ledger._book, current_spending(ledger, optimizer)
    if current is not None and (current.phase, current.passes) == (phase, passes):
        return current
    with book.reading():
        book.check(phase)
    if current is not None:
        current.close()
    book.spendings[optimizer] = Spending(book, optimizer, phase, passes)
    return book.spendings[optimizer]


def current_spending(ledger, optimizer):
    """The :class:`Spending` that follows ``optimizer`` now, or None."""
    return ledger._book.spendings.get(optimizer)


class Spending:
    """Follows the counter of an optimizer; see :func:`spending`.

    Nothing is counted here: ``iterations``, which the noisy update itself advances, tells how many
    updates were made, and the run id which of them the ledger knows already. What this object adds
    is the future: before updates are made, they are reserved.

    For shuffled data the cost is that of the passes begun. Keras shuffles anew for each of its
    epochs: an example may take part in the last update before and in the first one after. So
    updates of different epochs share no pass.
    """

    def __init__(self, book, optimizer, phase, passes):
        self.phase, self.passes = phase, passes
        self._book = book
        # Kept while updates are reserved, so that their number can be read; not beyond, so that
        # its variables can be freed.
        self._optimizer, self._kept = weakref.ref(optimizer), None
        self._chunk, self._reserved_at = 1, -_SECONDS_PER_RESERVATION
        self.closed = False
        self._restores = len(optimizer.restores)
        (run, made), released = optimizer.position, optimizer.released
        if optimizer.restores and optimizer.restores[-1][1][0] == run:
            made = optimizer.restores[-1][1][1]  # from there on updates are new
            released = optimizer.restores[-1][2]
        with book.exclusive():
            self._begin(run, made, released)
        self.read()
        _all.add(self)

    def _begin(self, run, made, released):
        """Starts a stretch: at the update that was reached, or after the last the ledger knows.

        ``overlap`` says how many the ledger knows beyond the one that was reached; ``adopted``,
        how many it did not know before it.
        """
        self._run, self.made, self._released = run, made, released
        known = self._book.covered(self._run)
        self._start = min(known, self.made)
        self.overlap, self.adopted = known - self._start, self.made - self._start
        self._closed_stop, self._in_epoch = self._start, False
        self._closed_passes = self._passes_waiting()
        self._reset_reserved(self.made)
        self._writer, self._revision, self._put_entry = secrets.token_hex(16), 0, None
        self._book.live[self._writer] = self._entry_now
        self._close_passes()
        self._put()

    def read(self):
        """int, updates that led to the present weights: the optimizer's ``iterations``.

        If a checkpoint was restored since the last look, what had been reserved before stays
        spent, and a new stretch begins.
        """
        if self.closed:
            raise PrivacyError(
                "Two callbacks with one ledger were told different things about this fit, and it "
                "can be counted in one way only. Give both the same sampler, or the same "
                "num_examples and sampling."
            )
        optimizer = self._optimizer()
        if optimizer is not None:
            for before, after, released in optimizer.restores[self._restores :]:
                self._restores += 1
                self._look(*before, released)
                self._begin_elsewhere(*after, released)
            self._look(*optimizer.position, optimizer.released)
        return self.made

    def _look(self, run, made, released):
        """Takes note of the updates since the last look, which no restored counter can hide."""
        expected = self.made + released - self._released
        moved = run != self._run or made < expected
        self.made, self._released = expected if moved else made, released
        self._reserved = max(self._reserved, self.made)
        if moved:
            self._begin_elsewhere(run, made, released)

    def _begin_elsewhere(self, run, made, released):
        with self._writing():
            self._put()
            self._stop_following()
            self._begin(run, made, released)

    def _passes_waiting(self):
        """int, passes of batches that wait for the first update to come: no more than batches."""
        optimizer = self._optimizer()
        if self.passes.parts == 1 or optimizer is None:
            return 0
        if optimizer.released != self._released:  # what waited then is not known any more
            return self.passes.parts - 1
        return optimizer.parts_waiting

    def reserved(self, within=None):
        """int, number of the last update that may be made without another :meth:`reserve`."""
        return self._reserved if within is None else self._granted.get(within, self._least)

    def _reset_reserved(self, made):
        # Each limit allows for itself: what one of them grants is no word of the others.
        self._reserved = self._least = made
        self._granted = {}

    def reserve(self, stop, within=None):
        """Has the ledger count the updates up to number ``stop`` before they are made.

        Args:
          stop: int, number of the last update that is about to be made.
          within: function from a list of phases to a bool, monotone, that says whether so much
            may be spent; None if there is no limit.

        Returns:
          bool: False if ``within`` does not allow it. Nothing is reserved then.
        """
        if stop <= self.reserved(within):
            return True
        with self._writing():
            made = self.read()
            most = self._rounded_up(max(stop, made + self._next_chunk()))
            if within is not None:
                most = self._largest(most, within)
                if most < stop:
                    return False
                self._granted[within] = most
            self._reserved, self._kept = max(most, made), self._optimizer()
            self._put()
        return True

    def updates_left(self, within, most=10**12):
        """int, how many more updates ``within`` allows if all follow in one epoch; at most
        ``most``."""
        with self._book.reading():
            return self._largest(self.read() + most, within) - self.made

    def news(self):
        """str, once: what may surprise in how the stretch began; empty if nothing does."""
        overlap, adopted, self.overlap, self.adopted = self.overlap, self.adopted, 0, 0
        if overlap:
            return (
                f"the run goes on at update {self.made}, but the ledger has {overlap} more of it: "
                "made after the checkpoint, or reserved when the process ended. They stay counted."
            )
        if adopted:
            return (
                f"the optimizer has made {adopted} updates before, which are counted as made on "
                "this data in the same way. If they were made on other data, compile with a new "
                "optimizer."
            )
        return ""

    def begin_epoch(self):
        """A pass over the data begins. What was done outside ``fit`` was another."""
        self.read()
        if not self._in_epoch:
            self._close_passes()
            self._in_epoch = True

    def end_epoch(self):
        """The pass has ended. The ledger is set to what was made."""
        self.read()
        if self._in_epoch:
            self._close_passes()
            self._in_epoch = False
        self.settle()

    def settle(self):
        """Sets the ledger to what was made: nothing is under way."""
        self._reset_reserved(self.read())
        if self._differs():
            with self._writing():
                self._put()
        self._kept = None

    def close(self):
        """Settles, and lets others follow the optimizer."""
        self.settle()
        self._stop_following()
        self.closed = True

    def _stop_following(self):
        del self._book.live[self._writer]

    @contextlib.contextmanager
    def _writing(self):
        try:
            with self._book.exclusive():
                yield
        except BaseException:
            self._reset_reserved(self.made)
            self._put_entry = None  # whatever is on file, it has to be written again
            raise

    def _put(self):
        if self._differs():
            self._revision += 1
            self._put_entry = self._entry(self._reserved)
            self._book.put(self._put_entry)

    def _differs(self):
        return self._put_entry != self._entry(self._reserved)

    def _entry_now(self):
        """The entry if nothing is under way."""
        optimizer = self._optimizer()
        if optimizer is None or len(optimizer.restores) > self._restores:
            return self._entry(self._reserved)
        (run, made), expected = optimizer.position, self.made + optimizer.released - self._released
        moved = run != self._run or made < expected
        return self._entry(max(self._reserved, expected) if moved else made)

    def _entry(self, stop):
        passes = self._passes(stop) if self.phase.sampling == "shuffle" else None
        phase = dataclasses.replace(self.phase, steps=stop - self._start, epochs_begun=passes)
        return Entry(self._run, self._writer, self._start, phase, self._revision)

    def _passes(self, stop):
        return self._closed_passes + self.passes.begun(stop - self._closed_stop, self._in_epoch)

    def _close_passes(self):
        self._closed_passes, self._closed_stop = self._passes(self.made), self.made

    def _rounded_up(self, stop):
        """The rest of a pass costs nothing more."""
        if self.phase.sampling != "shuffle":
            return stop
        return self._closed_stop + self.passes.filled(stop - self._closed_stop, self._in_epoch)

    def _next_chunk(self):
        """Updates to reserve: about as many as are made between two reservations."""
        now = time.monotonic()
        lasted = (now - self._reserved_at) / _SECONDS_PER_RESERVATION
        self._reserved_at = now
        if lasted < 0.5:
            self._chunk *= 4 if lasted < 0.25 else 2
        elif lasted > 2:
            self._chunk = max(self._chunk // 2, 1)
        return self._chunk

    def _largest(self, most, within):
        """The largest stop in [made, most] that is allowed; made if none is."""
        others = [e.phase for e in self._book.entries_reserved() if e.writer != self._writer]

        def allows(stop):
            return within([*others, self._entry(stop).phase])

        low, high = self.made, most
        if high <= low or allows(high):
            return max(high, low)
        step = 1
        while low + step < high and allows(low + step):
            low, step = low + step, 2 * step
        high = min(high, low + step)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if allows(middle) else (low, middle)
        return low


_all = weakref.WeakSet()
_process = os.getpid()


@atexit.register
def _settle_all():
    """An orderly end leaves no more on file than was spent."""
    if os.getpid() == _process:
        for one in list(_all):
            if not one.closed:
                one.settle()
