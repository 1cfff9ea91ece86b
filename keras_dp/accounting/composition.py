"""Epsilon of phases that follow each other on one data set."""

import dataclasses

import numpy as np

from keras_dp import renyi
from keras_dp.accounting import pld
from keras_dp.accounting.checks import checked_choice, checked_delta
from keras_dp.accounting.phases import MOST_RELEASES, Phase, common_relation

ACCOUNTANTS = ("rdp", "pld")


def epsilon_of_phases(phases, delta, accountant="rdp"):
    """The epsilon of everything that was released in these phases, one after the other.

    Each phase may depend on what the earlier ones released. Divergences of one release are found
    once in a process for each kind of release; composing is then a multiplication and a sum
    (Mironov 2017, arXiv 1702.07476, Proposition 1), some 50 microseconds a phase.

    Args:
      phases: list of :class:`Phase`, of one data set. Phases may differ in noise, batch, sampling
        and the number of units they draw from.
      delta: float in (0, 1).
      accountant: "rdp", or "pld", which is tighter and takes a second, at times several. Where
        PLD cannot be computed soundly this is the value of RDP, also a valid bound.

    Returns:
      float: 0.0 if there was no update, and above 0 otherwise. ``inf`` without noise.

    Raises:
      ValueError: not such arguments, or phases that have no neighbouring relation in common.
    """
    spent = Spent(phases)
    delta = checked_delta(delta)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    return spent.epsilon(delta) if accountant == "rdp" else spent.pld_epsilon(delta)


@dataclasses.dataclass(frozen=True)
class Releases:
    """A number of releases of one kind.

    Attributes:
      event: one release, as :attr:`Phase.release`.
      count: int >= 1, how many.
      rdp: float array ``[len(renyi.ORDERS)]``, Renyi divergences of one.
    """

    event: object
    count: int
    rdp: np.ndarray


class Spent:
    """The releases of phases, kind by kind, under the relation that the phases share.

    Args:
      phases: list of :class:`Phase`.

    Raises:
      ValueError: not phases, or no relation in common.
    """

    def __init__(self, phases):
        self.phases = _checked_phases(phases)
        self.relation = common_relation(self.phases)
        replace_one = self.relation == "replace_one"
        counts = {}
        for phase in self.phases:
            if phase.releases:
                counts[phase.release] = counts.get(phase.release, 0) + phase.releases
        self.releases = [
            Releases(event, min(count, MOST_RELEASES), renyi.divergences(event, replace_one))
            for event, count in counts.items()
        ]

    @property
    def rdp(self):
        """Float array ``[len(renyi.ORDERS)]``: Renyi divergences of all releases together."""
        return sum((float(r.count) * r.rdp for r in self.releases), np.zeros(len(renyi.ORDERS)))

    def epsilon(self, delta):
        """float, by RDP."""
        return renyi.epsilon_of(self.rdp, delta) if self.releases else 0.0

    def pld_epsilon(self, delta):
        """float, by privacy loss distributions, at most :meth:`epsilon`."""
        return pld.epsilon_of(self.releases, self.relation, delta, self.epsilon(delta))

    def pld_is_quick(self, delta):
        """bool, whether :meth:`pld_epsilon` takes less than about a second."""
        return pld.is_quick(self.releases, self.relation, delta, self.epsilon(delta))


def _checked_phases(phases):
    if isinstance(phases, Phase):
        phases = [phases]
    if not isinstance(phases, (list, tuple)) or not all(isinstance(p, Phase) for p in phases):
        raise ValueError(
            f"phases must be a list of keras_dp.accounting.Phase; received {phases!r}. Make one "
            "for each part of the training that has settings of its own."
        )
    return list(phases)
