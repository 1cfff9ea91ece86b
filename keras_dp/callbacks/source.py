"""Where batches come from, by what the user says, and whether ``fit`` can be getting them there.

The sampling that is accounted has to be the sampling that ran. So what the user says is compared
with what ``fit`` was given (:mod:`keras_dp.entry_points`). What cannot be is refused before the
first update, with the way out; what cannot be told apart is taken on trust, which the
documentation of :class:`EpsilonLogger` says.
"""

import math

import keras
import tensorflow as tf

from keras_dp.accounting import Phase
from keras_dp.callbacks.accumulated import Layout, accumulation
from keras_dp.errors import PrivacyError
from keras_dp.sampling.users import require_same_users


class Source:
    """What the user says of the batches; see :class:`EpsilonLogger` for the arguments.

    Attributes:
      sampler: the sampler, or None.
      num_examples: int, units drawn from.
      sampling: str.
    """

    def __init__(self, owner, sampler, num_examples, sampling):
        self.sampler = sampler
        if sampler is None:
            if num_examples is None or sampling is None:
                raise ValueError(_UNKNOWN_SOURCE.format(owner=owner, n=num_examples, s=sampling))
            self.num_examples, self.sampling = num_examples, sampling
            self._unit, self._examples_per_user = "example", None
            return
        if num_examples is not None or sampling is not None:
            raise ValueError(
                f"{owner} received a sampler and also num_examples={num_examples!r}, "
                f"sampling={sampling!r}. The sampler knows both: leave them out."
            )
        missing = [name for name in _SAMPLER_ATTRIBUTES if not hasattr(sampler, name)]
        if missing:
            raise ValueError(
                f"sampler must be a keras_dp.PoissonSampler; received {type(sampler).__name__}, "
                f"without {', '.join(missing)}. For other data pass num_examples= and sampling=."
            )
        self.num_examples = getattr(sampler, "num_units", sampler.num_examples)
        self.sampling = sampler.sampling
        self._unit = getattr(sampler, "unit", "example")
        self._examples_per_user = getattr(sampler, "examples_per_user", None)

    def __repr__(self):
        return f"{self.num_examples} {self._unit}s with sampling={self.sampling!r}"

    @property
    def updates_drawn(self):
        """int, draws that the sampler has handed out so far; None if that cannot be known."""
        if self.sampler is None or self.sampler.use_multiprocessing:
            return None
        return getattr(self.sampler, "updates_drawn", self.sampler.batches_drawn)

    def check_settings(self):
        """Raises ValueError for numbers and words that no training could have."""
        self._phase(self.num_examples, 1.0)

    def phase(self, optimizer, *, participations=1):
        """The settings of the updates that ``optimizer`` makes of such batches, as a phase.

        Args:
          optimizer: DP optimizer.
          participations: int, how often an example of shuffled data can be in one update.

        Returns:
          :class:`Phase` without updates.
        """
        times = participations if self.sampling == "shuffle" else 1
        return self._phase(optimizer.batch_size, optimizer.noise_multiplier, times)

    def layout(self, optimizer, fit, batches):
        """How the batches of ``fit``, so many in an epoch, make up updates: a :class:`Layout`."""
        x = fit.x if fit is not None else None
        if hasattr(x, "sampling"):
            return Layout(optimizer, self, fit, batches, exact=True)
        if rows_of(x) is not None:
            size = min(fit.batch_size or 32, self.num_examples)
            length = -(-self.num_examples // size)
            return Layout(optimizer, self, fit, batches, length, exact=True)
        return Layout(optimizer, self, fit, batches, length_of(x))

    def _phase(self, batch_size, noise_multiplier, participations=1):
        return Phase(
            num_examples=self.num_examples,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            sampling=self.sampling,
            epochs_begun=0 if self.sampling == "shuffle" else None,
            participations_per_update=participations,
            unit=self._unit,
            examples_per_user=self._examples_per_user,
        )

    def check(self, optimizer, fit, workers=1):
        """Refuses an optimizer, or a ``fit``, that cannot be of these batches.

        Args:
          optimizer: DP optimizer.
          fit: :class:`keras_dp.entry_points.FitCall`, or None if nobody saw it.
          workers: int >= 1, processes that train together, each on data of its own.

        Raises:
          PrivacyError: with what does not fit, and what to do.
        """
        self._check_accumulation(optimizer)
        if self.sampler is not None:
            self._check_sampler(self.sampler, optimizer)
        require_same_users(self.sampler, optimizer)
        if fit is None:
            return
        if workers > 1:
            self._check_workers(workers, fit)
        if self.sampler is not None:
            self._check_fit_gets_sampler(fit)
        else:
            self._check_data(optimizer, fit)

    def _check_sampler(self, sampler, optimizer):
        if sampler.batch_size * accumulation(optimizer) != optimizer.batch_size:
            unit = getattr(sampler, "unit", self._unit)
            raise PrivacyError(
                f"The sampler draws {sampler.batch_size} {unit}s on average, but the "
                f"optimizer's batch_size is {optimizer.batch_size}: it would divide by one number "
                "what was drawn, and accounted, by the other. Give both the same batch_size."
            )

    def _check_accumulation(self, optimizer):
        if self.sampling in DRAWS and accumulation(optimizer) > 1:
            raise PrivacyError(
                f"The optimizer adds up {accumulation(optimizer)} batches for an update, but with "
                f"sampling={self.sampling!r} each batch is a draw of its own: an example could be "
                "in several of them. Leave gradient_accumulation_steps out, and pass "
                "PoissonSampler physical_batch_size= to have one draw in several pieces."
            )

    def _check_workers(self, workers, fit):
        """Draws that each worker makes for itself hold an example once for each of them."""
        if self.sampling in DRAWS and not hasattr(fit.x, "sampling"):
            raise PrivacyError(
                f"fit trains on {describe(fit.x)} on {workers} workers. Whether their batches are "
                f"parts of one draw, which sampling={self.sampling!r} means, cannot be told. Train "
                "on keras_dp.PoissonSampler itself, model.fit(sampler, ...), of which each worker "
                "takes its share."
            )

    def _check_fit_gets_sampler(self, fit):
        if fit.x is self.sampler:
            return
        what, way_out = describe(fit.x), _TRAIN_ON_SAMPLER
        if rows_of(fit.x) is not None:
            raise PrivacyError(
                f"fit trains on {what}, not on the sampler: it cuts fixed batches, and "
                f"amplification by Poisson sampling is not proved for them. {way_out}"
            )
        if hasattr(fit.x, "sampling"):
            raise PrivacyError(f"fit trains on another sampler, {what}. {way_out}")
        if self.sampler.use_multiprocessing:
            raise PrivacyError(
                f"fit trains on {what}. Whether its batches are the sampler's cannot be told when "
                f"they are drawn in other processes (use_multiprocessing=True). {way_out}"
            )
        if fit.validation_data is self.sampler:
            raise PrivacyError(
                f"fit trains on {what} and validates on the sampler: which of its draws were "
                f"trained on cannot be told. {way_out}"
            )

    def _check_data(self, optimizer, fit):
        if hasattr(fit.x, "sampling"):
            self._check_other_sampler(optimizer, fit.x)
            return
        rows = rows_of(fit.x)
        if rows is not None:
            self._check_arrays(optimizer, fit, rows)
        else:
            self._check_batches(optimizer, fit)

    def _check_other_sampler(self, optimizer, sampler):
        found = getattr(sampler, "num_units", getattr(sampler, "num_examples", self.num_examples))
        if (sampler.sampling, found) != (self.sampling, self.num_examples):
            raise PrivacyError(
                f"fit trains on a {type(sampler).__name__} of {found} units with sampling="
                f"{sampler.sampling!r}, but was said to train on num_examples={self.num_examples} "
                f"with sampling={self.sampling!r}. Pass the {type(sampler).__name__} itself in "
                "place of the two."
            )
        if hasattr(sampler, "batch_size"):
            self._check_sampler(sampler, optimizer)

    def _check_arrays(self, optimizer, fit, rows):
        if self.sampling not in ("shuffle", "full_batch"):
            raise PrivacyError(
                f"fit cuts arrays into fixed batches, but was said to have sampling="
                f"{self.sampling!r}. Train on keras_dp.PoissonSampler(x, y, batch_size="
                f'{optimizer.batch_size}), or pass sampling="shuffle".'
            )
        part = ""
        if fit.validation_split and fit.validation_data is None:
            part = f" ({rows} without validation_split={fit.validation_split:g} of them)"
            rows = math.floor(rows * (1.0 - fit.validation_split))
        if rows != self.num_examples:
            raise PrivacyError(
                f"fit trains on {rows} examples{part}, but was said to train on "
                f"{self.num_examples}. Pass num_examples={rows}."
            )
        size, parts = fit.batch_size or 32, accumulation(optimizer)
        if min(size, rows) * parts != optimizer.batch_size:
            given = "fit's batch_size is" if fit.batch_size else "fit got no batch_size and takes"
            times = f", {parts} of them in an update" if parts > 1 else ""
            raise PrivacyError(
                f"{given} {size}{times}, but the optimizer's batch_size is "
                f"{optimizer.batch_size}, by which it divides and from which epochs are counted. "
                f"Pass fit batch_size={-(-optimizer.batch_size // parts)}, or change the "
                "optimizer's."
            )

    def _check_batches(self, optimizer, fit):
        """Batches that are formed elsewhere: their number, and their size if it is static."""
        parts, batches, size = accumulation(optimizer), length_of(fit.x), static_size_of(fit.x)
        if size is not None and self.sampling != "poisson" and size * parts != optimizer.batch_size:
            raise PrivacyError(
                f"fit gets batches of {size} examples, and an update takes {parts} of them, but "
                f"the optimizer's batch_size is {optimizer.batch_size}. Make them equal."
            )
        if self.sampling != "shuffle" or batches is None or fit.steps_per_epoch:
            return
        most = -(-self.num_examples * parts // optimizer.batch_size)
        if batches > most:
            raise PrivacyError(
                f"fit gets {batches} batches in an epoch, but {self.num_examples} examples make no "
                f"more than {most} of {optimizer.batch_size // parts}. Pass the number of examples "
                "that an epoch really has as num_examples=, or the batch size that the data "
                "really has as the optimizer's batch_size."
            )


# How batches are formed that are each drawn from all examples, whatever the others hold.
DRAWS = ("poisson", "without_replacement")


def rows_of(x):
    """int, rows of arrays that ``fit`` would cut into batches; None if ``x`` is something else."""
    if isinstance(x, (keras.utils.PyDataset, tf.data.Dataset)) or callable(x):
        return None
    shapes = [getattr(leaf, "shape", None) for leaf in keras.tree.flatten(x) if leaf is not None]
    if not shapes or not all(shapes):
        return None
    return int(shapes[0][0])


def length_of(x):
    """int, batches in one pass over ``x``, or None if unknown or without end."""
    if isinstance(x, tf.data.Dataset):
        length = int(x.cardinality())
        return length if length >= 0 else None
    return getattr(x, "num_batches", None) if isinstance(x, keras.utils.PyDataset) else None


def static_size_of(x):
    """int, rows of every batch of ``x``, or None if that is not fixed."""
    if not isinstance(x, tf.data.Dataset):
        return None
    shapes = [getattr(s, "shape", None) for s in tf.nest.flatten(x.element_spec)]
    return shapes[0][0] if shapes and shapes[0] is not None and shapes[0].rank else None


def describe(x):
    """What ``x`` is, for an error."""
    rows = rows_of(x)
    return f"a {type(x).__name__}" if rows is None else f"{type(x).__name__} of {rows} examples"


_SAMPLER_ATTRIBUTES = (
    "num_examples",
    "batch_size",
    "sampling",
    "batches_drawn",
    "use_multiprocessing",
)

_TRAIN_ON_SAMPLER = (
    "Train on the sampler itself, model.fit(sampler, ...), or account for what you train on, "
    'such as EpsilonLogger(num_examples=..., sampling="shuffle", delta=...).'
)

_UNKNOWN_SOURCE = (
    "{owner} received num_examples={n!r} and sampling={s!r}, but has to know where batches come "
    "from. Either pass the keras_dp.PoissonSampler that fit trains on: {owner}(sampler, "
    'delta=...). Or pass num_examples= and sampling=: "shuffle" for fixed batches of a shuffled '
    'data set, which is what fit does with arrays; "poisson" only if every batch draws each '
    'example independently; "full_batch" if each is the whole data set.'
)
