"""How the batches of one ``fit`` make up updates, and how many passes over the data those show.

With ``gradient_accumulation_steps=n`` an update takes n batches. Every ``fit`` begins a logical
batch (``DPOptimizer.begin_logical_batch``), so what one update holds depends on this ``fit`` alone.
While each epoch is whole passes of a multiple of n batches, an update stays within one pass, and an
example is in it at most once. Otherwise an update holds batches of two passes, if every epoch has
at least n - 1 of them; of up to n passes if epochs may be shorter. What is not known to be aligned
is taken for not aligned.
"""

import dataclasses

from keras_dp.errors import PrivacyError


def accumulation(optimizer):
    """int, batches of ``fit`` that one update takes."""
    return getattr(optimizer, "gradient_accumulation_steps", None) or 1


@dataclasses.dataclass(frozen=True)
class Passes:
    """How many passes over the data updates show at most.

    Attributes:
      length: int >= 1, updates of one pass, in an epoch.
      waiting: 0 or 1, updates more that the batches which wait may stand for, in an epoch.
      outside_length, outside_waiting: the same for what is done outside of epochs.
      parts: int >= 1, batches in an update.
    """

    length: int
    waiting: int = 0
    outside_length: int = 1
    outside_waiting: int = 0
    parts: int = 1

    def begun(self, updates, in_epoch):
        """int, passes that so many updates in a row have begun."""
        if not in_epoch and not updates:
            return 0
        length, waiting = self._counted(in_epoch)
        # A batch that waits for the next update has begun a pass, too.
        least = 1 if in_epoch and self.parts > 1 else 0
        return max(-(-(updates + waiting) // length), least)

    def filled(self, updates, in_epoch):
        """int, the most updates that begin no more passes than ``updates`` do."""
        length, waiting = self._counted(in_epoch)
        return max(self.begun(updates, in_epoch) * length - waiting, updates)

    def _counted(self, in_epoch):
        if in_epoch:
            return self.length, self.waiting
        return self.outside_length, self.outside_waiting


class Layout:
    """What one ``fit`` puts into its updates.

    Args:
      optimizer: DP optimizer.
      source: ``Source``.
      fit: ``FitCall``, or None if nobody saw it.
      batches: int, batches in an epoch, or None if not known.
      length: int, batches in one pass over what ``fit`` trains on, or None if not known.
      exact: bool, whether the last batch of a pass is surely not dropped.

    Attributes:
      participations: int, how often one example can be in one update.
      passes: :class:`Passes`.
    """

    def __init__(self, optimizer, source, fit, batches, length=None, exact=False):
        self._parts, self._batches = accumulation(optimizer), batches
        self._steps = fit.steps_per_epoch if fit is not None else None
        n, size = source.num_examples, optimizer.batch_size
        # A last batch that is not full may have been dropped.
        few, many = n * self._parts // size, -(-n * self._parts // size)
        if exact:
            self._lengths = {many}
        else:
            self._lengths = {length} if length in (few, many) else {few, many}
        self._full_batch = source.sampling == "full_batch" and self._parts > 1
        self._seen, self._length = fit is not None, length
        aligned = self._aligned(fit)
        if aligned:
            self.participations = 1
        elif batches and batches >= self._parts - 1:
            self.participations = min(2, self._parts)
        else:
            self.participations = self._parts
        one_pass = fit is not None and batches and not self._steps
        self.passes = self._passes(-(-n // size), aligned, aligned or one_pass)

    def _passes(self, length, aligned, whole):
        """Epochs of whole passes show one in at most ``length`` updates; others are not known."""
        if aligned:
            return Passes(length, 0, length, 0, self._parts)
        least = max(min(self._lengths) // self._parts, 1)  # updates that fit into every pass
        in_epoch = (length, 0) if whole else (least, 1)
        return Passes(*in_epoch, least, 1, self._parts)

    def _aligned(self, fit):
        if self._parts == 1:
            return True
        if fit is None or not self._batches:
            return False
        if not self._steps:
            return self._batches % self._parts == 0
        return all(k % self._parts == 0 and self._batches % k == 0 for k in self._lengths)

    def ended(self, batches, updates):
        """bool, whether an epoch of so many batches and updates leaves what this said true."""
        if self._parts == 1:
            return True
        whole = self._batches is not None and batches >= self._batches
        return whole and (self.participations > 1 or updates == self._batches // self._parts)

    def cut(self):
        """An epoch ended early, and another one of the same ``fit`` follows."""
        if self._parts == 1:
            return
        if self._full_batch:
            raise PrivacyError(
                f"An epoch ended before its {self._batches} batches, and its last ones would make "
                "an update with those of the next: that is not the full batch which is accounted. "
                "Train on data that every epoch can read to the end, or leave "
                "gradient_accumulation_steps out and take microbatch_size."
            )
        self.participations = self._parts
        self.passes = self._passes(self.passes.length, False, False)

    def check(self):
        """Raises PrivacyError if updates of the full batch are not made up by these batches."""
        n, batches, length = self._parts, self._batches, self._length
        if not self._full_batch:
            return
        if not self._seen or not batches or batches % n or (length not in (None, n)):
            raise PrivacyError(
                f'sampling="full_batch" with gradient_accumulation_steps={n} needs each {n} '
                f"batches in a row to be the whole data set; fit gets {batches or 'unknown'} "
                f"batches in an epoch, and a pass has {length or 'unknown'}. Train with fit on "
                f"arrays or a data set that is cut into {n} batches, or leave "
                "gradient_accumulation_steps out and take microbatch_size."
            )
