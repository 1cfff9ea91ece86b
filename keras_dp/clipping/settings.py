"""The settings that decide what a private update releases, checked once."""

import dataclasses
import math
import numbers

from keras_dp.clipping import clip

NOISE_SOURCES = ("fast", "secure")
BACKENDS = ("auto", "layerwise", "vectorized", "loop")


@dataclasses.dataclass(frozen=True)
class PrivacySettings:
    """The arguments of a DP optimizer that decide what is released. They never change.

    Attributes:
      l2_norm_clip: the bound on the gradient norm of a unit.
      noise_multiplier: standard deviation of the noise over the sensitivity.
      batch_size: expected units in one update; the divisor.
      clipping: the clip function.
      microbatch_size: units in one pass, or None.
      backend: how per-example gradients are found.
      gradient_accumulation_steps: batches of one update; None is one.
      augmentations: copies of each row whose gradients are averaged (De et al. 2022, arXiv
        2204.13650, section 3.2); None is one.
      examples_per_user: None, and a unit is an example, one row. Or k, and a unit is a user: k
        consecutive rows, of which missing ones are padding. The gradient of a user is the mean
        over the rows that are there.
      noise_source: what the noise's random bits come from.
    """

    l2_norm_clip: float
    noise_multiplier: float
    batch_size: int
    clipping: str = "flat"
    microbatch_size: int | None = None
    backend: str = "auto"
    gradient_accumulation_steps: int | None = None
    augmentations: int | None = None
    examples_per_user: int | None = None
    noise_source: str = "fast"

    def __post_init__(self):
        require(
            _is_number(self.l2_norm_clip) and 1e-10 <= self.l2_norm_clip < math.inf,
            "l2_norm_clip",
            self.l2_norm_clip,
            "a finite number of at least 1e-10, the bound on each example's gradient norm",
        )
        require(
            _is_number(self.noise_multiplier) and 0 <= self.noise_multiplier < math.inf,
            "noise_multiplier",
            self.noise_multiplier,
            "a finite number of at least 0; keras_dp.compute_noise_multiplier finds it",
        )
        require(
            _is_count(self.batch_size),
            "batch_size",
            self.batch_size,
            "a whole number of at least 1, the expected number of examples (or users, with "
            "examples_per_user) in one update",
        )
        require(
            self.microbatch_size is None or _is_count(self.microbatch_size),
            "microbatch_size",
            self.microbatch_size,
            "None or a whole number of at least 1, the examples (or users) of one pass",
        )
        for name, meaning in _COUNTS.items():
            value = getattr(self, name)
            require(
                value is None or _is_count(value),
                name,
                value,
                f"None or a whole number of at least 1, {meaning}",
            )
        require(self.clipping in clip.CLIPPINGS, "clipping", self.clipping, _one_of(clip.CLIPPINGS))
        require(self.backend in BACKENDS, "backend", self.backend, _one_of(BACKENDS))
        require(
            self.noise_source in NOISE_SOURCES,
            "noise_source",
            self.noise_source,
            _one_of(NOISE_SOURCES),
        )

    @property
    def rows_per_unit(self):
        """Rows of the model's batch that belong to one unit: its examples, and their copies."""
        return (self.examples_per_user or 1) * (self.augmentations or 1)


_COUNTS = {
    "gradient_accumulation_steps": "the batches whose clipped sums add up to one update",
    "augmentations": "the augmented copies of an example that are averaged before the clip",
    "examples_per_user": "the rows of one user, whose mean gradient is clipped once",
}


def require(condition, name, received, allowed):
    """Raises ValueError that says what ``name`` has to be and what it was."""
    if not condition:
        raise ValueError(f"{name} must be {allowed}. Received: {name}={received!r}")


def _one_of(allowed):
    return "one of " + ", ".join(repr(a) for a in allowed)


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_count(value):
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= 1
