"""The settings that decide what a private update releases, checked once."""

import dataclasses
import math
import numbers

from keras_dp.clipping import clip

BACKENDS = ("auto", "layerwise", "vectorized", "loop")


@dataclasses.dataclass(frozen=True)
class PrivacySettings:
    """The arguments of a DP optimizer that decide what is released. They never change."""

    l2_norm_clip: float
    noise_multiplier: float
    batch_size: int
    clipping: str = "flat"
    microbatch_size: int | None = None
    backend: str = "auto"

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
            "a whole number of at least 1, the expected number of examples in one update",
        )
        require(
            self.microbatch_size is None or _is_count(self.microbatch_size),
            "microbatch_size",
            self.microbatch_size,
            "None or a whole number of at least 1, the examples of one pass",
        )
        require(self.clipping in clip.CLIPPINGS, "clipping", self.clipping, _one_of(clip.CLIPPINGS))
        require(self.backend in BACKENDS, "backend", self.backend, _one_of(BACKENDS))


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
