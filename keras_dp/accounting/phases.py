"""A phase: updates of one kind, on one data set.

Five ways to form batches are known. A *unit* is what is drawn and protected: an example, or a user.

``"poisson"``              every update draws each unit independently with probability
                           batch_size / num_examples. Amplification by sampling counts. With a
                           ``capacity`` a draw that is larger is cut to it at random.
``"shuffle"``              fixed batches of a shuffled data set. No amplification: a unit takes
                           part in one update of every epoch, and that is all it shows in.
``"without_replacement"``  every update draws exactly batch_size of the units, all such sets alike.
``"full_batch"``           every update uses all units.

What two neighbouring data sets differ by is one of:

``"add_remove"``   one unit more or less.
``"zero_out"``     one unit replaced by a null one, whose gradient is zero; their number is public.
``"replace_one"``  one unit replaced by any other: two clipped gradients differ by twice the norm.
"""

import dataclasses
import functools

import dp_accounting

from keras_dp.accounting.checks import (
    STEPS_ADVICE,
    checked_choice,
    checked_int,
    checked_noise,
    checked_sizes,
)

# Under shuffling one unit more or less moves all others to other batches; with exactly batch_size
# units a missing one cannot be drawn around. Of a draw that was cut, what null units would do is
# not analysed. The first relation of each is the default.
RELATIONS = {
    "poisson": ("add_remove", "zero_out", "replace_one"),
    "shuffle": ("zero_out", "replace_one"),
    "without_replacement": ("replace_one",),
    "full_batch": ("add_remove", "zero_out", "replace_one"),
}
SAMPLINGS = tuple(RELATIONS)
NEIGHBORING_RELATIONS = ("add_remove", "zero_out", "replace_one")
UNITS = ("example", "user")

# Noise multipliers between which every intermediate number can be represented. Epsilon falls
# with noise, so the bounds stand in for whatever lies outside.
NO_NOISE, MOST_NOISE = 1e-100, 1e10
RAREST_SAMPLING = 1e-50
MOST_RELEASES = 10**150


def steps_per_epoch(num_examples, batch_size):
    """Updates in one epoch: ceil(num_examples / batch_size).

    Args:
      num_examples: int >= 1.
      batch_size: int in [1, num_examples], expected examples in one update.

    Returns:
      int >= 1.

    Raises:
      ValueError: not such numbers.
    """
    num_examples, batch_size = checked_sizes(num_examples, batch_size)
    return -(-num_examples // batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Updates of one kind: Gaussian noise on the sum of clipped gradients of a batch.

    Immutable and hashable. ``dataclasses.replace(phase, steps=n)`` gives the same with another
    number of updates. What it costs says :func:`keras_dp.accounting.epsilon_of_phases`.

    Attributes:
      num_examples: int >= 1, units drawn from; counts as public. With ``capacity`` it is the size
        of the larger of two neighbouring data sets.
      batch_size: int in [1, num_examples], expected units in one update.
      noise_multiplier: float >= 0, standard deviation of the noise over the clipping norm.
      sampling: one of ``SAMPLINGS``, see above.
      steps: int >= 0, updates made.
      epochs_begun: int >= 0, passes over the shuffled data that were begun, if known; for
        ``sampling="shuffle"`` alone. Without it: ceil(steps / steps_per_epoch).
      participations_per_update: int >= 1, how often one unit can be in one update, for
        ``sampling="shuffle"`` alone: 2 if accumulated batches may span two epochs.
      capacity: int >= 1, units to which a larger Poisson draw is cut, or None.
      neighboring_relation: one of ``NEIGHBORING_RELATIONS``. None chooses that of the sampling:
        "zero_out" for "shuffle", "replace_one" for "without_replacement", else "add_remove".
      unit: "example" or "user", what is drawn, clipped and protected. Only words depend on it.
      examples_per_user: int >= 1 or None, examples that one user has in an update at most, if the
        unit is a user. Only words depend on it.

    Raises:
      ValueError: an attribute of the wrong kind or outside its range, or a relation under which
        nothing is known about the sampling.
    """

    num_examples: int
    batch_size: int
    noise_multiplier: float
    sampling: str = "poisson"
    steps: int = 0
    epochs_begun: int | None = None
    participations_per_update: int = 1
    capacity: int | None = None
    neighboring_relation: str | None = None
    unit: str = "example"
    examples_per_user: int | None = None

    def __post_init__(self):
        num_examples, batch_size = checked_sizes(self.num_examples, self.batch_size)
        self._set("num_examples", num_examples)
        self._set("batch_size", batch_size)
        self._set("noise_multiplier", checked_noise(self.noise_multiplier))
        checked_choice("sampling", self.sampling, SAMPLINGS)
        self._set("steps", checked_int("steps", self.steps, 0, STEPS_ADVICE))
        if self.epochs_begun is not None:
            begun = checked_int("epochs_begun", self.epochs_begun, 0, "Count passes begun.")
            self._set("epochs_begun", begun)
        self._check_participations()
        self._check_capacity()
        self._check_relation()
        self._check_unit()
        if self.sampling == "full_batch" and batch_size != num_examples:
            raise ValueError(
                f'sampling="full_batch" means that every update uses all examples, but '
                f"batch_size={batch_size} and num_examples={num_examples}. Make them equal, or "
                'pass sampling="poisson" or "shuffle".'
            )

    def _set(self, name, value):
        object.__setattr__(self, name, value)

    def _check_participations(self):
        name, advice = "participations_per_update", "Usually it is 1."
        times = checked_int(name, self.participations_per_update, 1, advice)
        self._set(name, times)
        if times > 1 and self.sampling != "shuffle":
            raise ValueError(
                f"{name}={times} with sampling={self.sampling!r}: only accumulated batches of "
                'shuffled data can hold a unit twice. Leave it out, or pass sampling="shuffle".'
            )
        if times > 1 and self.epochs_begun is None:
            raise ValueError(
                f"{name}={times} needs epochs_begun: where updates span epochs, their number does "
                "not tell how many were begun. Pass epochs_begun=, the passes over the data."
            )

    def _check_capacity(self):
        if self.capacity is None:
            return
        capacity = checked_int("capacity", self.capacity, 1, "Leave it out if no draw is cut.")
        self._set("capacity", capacity)
        if self.sampling != "poisson":
            raise ValueError(
                f"capacity={capacity} with sampling={self.sampling!r}: only Poisson draws have a "
                'size that could exceed it. Leave it out, or pass sampling="poisson".'
            )
        if self._is_cut and not hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent"):
            raise ValueError(
                f"capacity={capacity} cuts some draws of {self.num_examples} units, and the "
                "installed dp-accounting cannot account for that: install dp-accounting 0.6.0 or "
                "later, or let no draw be cut."
            )

    @property
    def _is_cut(self):
        return self.capacity is not None and self.capacity < self.num_examples

    def _check_relation(self):
        if self.neighboring_relation is None:
            self._set("neighboring_relation", RELATIONS[self.sampling][0])
        relation = checked_choice(
            "neighboring_relation", self.neighboring_relation, NEIGHBORING_RELATIONS
        )
        known = [r for r in RELATIONS[self.sampling] if not (self._is_cut and r == "zero_out")]
        if relation not in known:
            cut = f" and capacity={self.capacity}" if self._is_cut else ""
            raise ValueError(
                f"neighboring_relation={relation!r} with sampling={self.sampling!r}{cut}: no "
                f"guarantee is known. Pass {' or '.join(map(repr, known))}."
            )

    def _check_unit(self):
        checked_choice("unit", self.unit, UNITS)
        if self.examples_per_user is None:
            return
        count = checked_int("examples_per_user", self.examples_per_user, 1, "Or leave it out.")
        self._set("examples_per_user", count)
        if self.unit != "user":
            raise ValueError(
                f"examples_per_user={count} with unit={self.unit!r}: it counts examples of one "
                'user. Pass unit="user", or leave it out.'
            )

    @property
    def sampling_probability(self):
        """float, batch_size / num_examples."""
        return max(self.batch_size / self.num_examples, RAREST_SAMPLING)

    @property
    def steps_per_epoch(self):
        """int, updates in one epoch."""
        return steps_per_epoch(self.num_examples, self.batch_size)

    @property
    def passes(self):
        """int, epochs that were begun at least, whatever ``epochs_begun`` says."""
        return max(-(-self.steps // self.steps_per_epoch), self.epochs_begun or 0)

    @property
    def releases(self):
        """int, releases of the clipping norm's sensitivity that show one unit, at most.

        Every update is one, except for shuffled batches. There a unit takes part ``passes`` times,
        at most m = ``participations_per_update`` times in one update. The cost of Gaussian noise
        is linear in the squared sensitivity, and the squares of counts that are at most m and add
        up to ``passes`` are together at most m * ``passes``.
        """
        if self.sampling != "shuffle":
            return self.steps
        times = self.participations_per_update
        return min(times * self.passes, times**2 * self.steps)

    @functools.cached_property
    def release(self):
        """One release, as an event of dp-accounting.

        Noise is told relative to the clipping norm, which is what its PLD accountant expects under
        every relation. Its RDP accountant expects it relative to the sensitivity, which under
        "replace_one" is twice as large.
        """
        if self.noise_multiplier < NO_NOISE:
            return dp_accounting.NonPrivateDpEvent()
        sigma, q = min(self.noise_multiplier, MOST_NOISE), self.sampling_probability
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        if self.sampling == "without_replacement" and q < 1:
            return dp_accounting.SampledWithoutReplacementDpEvent(
                self.num_examples, self.batch_size, gaussian
            )
        if self._is_cut:
            return dp_accounting.TruncatedSubsampledGaussianDpEvent(
                self.num_examples, q, self.capacity, sigma
            )
        if self.sampling == "poisson" and q < 1:
            return dp_accounting.PoissonSampledDpEvent(q, gaussian)
        return gaussian

    @property
    def event(self):
        """The whole phase, as an event of dp-accounting; see :attr:`release`."""
        if self.releases == 0:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.SelfComposedDpEvent(self.release, self.releases)

    def to_dict(self):
        """The attributes as a dict that ``json.dumps`` takes and :meth:`from_dict` reads."""
        return {"mechanism": "gaussian"} | dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values):
        """The phase that :meth:`to_dict` wrote.

        Args:
          values: dict.

        Returns:
          Phase.

        Raises:
          ValueError: no dict, a key that is missing or unknown, or a value that is not allowed.
        """
        names = ["mechanism"] + [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or set(values) != set(names):
            raise ValueError(
                f"A phase must be a dict with the keys {', '.join(names)}; received {values!r}. "
                "Pass what Phase.to_dict wrote."
            )
        values = dict(values)
        checked_choice("mechanism", values.pop("mechanism"), ("gaussian",))
        return cls(**values)


def common_relation(phases):
    """The neighbouring relation that holds for all phases together.

    A unit replaced by a null one costs as much as one that is missing where both are allowed. So
    phases of "add_remove" and "zero_out" together have "zero_out", if each allows it.

    Args:
      phases: list of :class:`Phase`.

    Returns:
      str, one of ``NEIGHBORING_RELATIONS``; "add_remove" if there are no phases.

    Raises:
      ValueError: they have none in common.
    """
    relations = {phase.neighboring_relation for phase in phases}
    if len(relations) <= 1:
        return relations.pop() if relations else "add_remove"
    can_zero_out = all("zero_out" in RELATIONS[p.sampling] and not p._is_cut for p in phases)
    if relations == {"add_remove", "zero_out"} and can_zero_out:
        return "zero_out"
    received = ", ".join(
        f"{phase.sampling!r} by {phase.neighboring_relation!r}" for phase in dict.fromkeys(phases)
    )
    raise ValueError(
        f"The phases protect against different changes of the data: {received}. A guarantee for "
        'all needs one relation: pass neighboring_relation="replace_one" for each.'
    )
