"""Learning rates that change with the number of updates."""

import math

import keras
from keras import ops

SCHEDULES = ("cos", "fixed")


@keras.saving.register_keras_serializable(package="train_scripts")
class WarmUp(keras.optimizers.schedules.LearningRateSchedule):
    """A linear rise, then a constant rate or half a cosine down to zero.

    With t the number of an update from 1 on, w those of the rise and T all of them, the rate is
    ``peak * t / w`` up to t = w, and then ``peak`` or
    ``peak / 2 * (1 + cos(pi * (t - w - 1) / (T - w)))``. No update has the rate 0: it would cost
    privacy for nothing.

    Args:
      peak: float, the largest rate.
      updates: T, int of at least 1.
      warmup_updates: w, int from 0 to ``updates``.
      schedule: "cos" or "fixed", what follows the rise.
      steps_per_update: int, steps that Keras counts for one update, where it counts the parts of an
        accumulated one (``gradient_accumulation_steps`` of a plain optimizer).

    Raises:
      ValueError: for another schedule, or numbers outside their range.
    """

    def __init__(self, peak, updates, warmup_updates=0, schedule="cos", steps_per_update=1):
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {SCHEDULES}, received {schedule!r}.")
        if not 0 <= warmup_updates <= updates or updates < 1:
            raise ValueError(
                "warmup_updates must be from 0 to updates, which must be at least 1; received "
                f"warmup_updates={warmup_updates!r} and updates={updates!r}."
            )
        self.peak, self.updates, self.warmup_updates = peak, updates, warmup_updates
        self.schedule, self.steps_per_update = schedule, steps_per_update

    def __call__(self, step):
        """The rate of the update that comes after ``step`` steps."""
        update = ops.cast(ops.floor_divide(step, self.steps_per_update), "float32") + 1.0
        rise = ops.minimum(1.0, update / max(self.warmup_updates, 1))
        if self.schedule == "fixed":
            return self.peak * rise
        after = ops.maximum(0.0, update - self.warmup_updates - 1.0)
        share = ops.minimum(1.0, after / max(self.updates - self.warmup_updates, 1))
        fall = 0.5 * (1.0 + ops.cos(math.pi * share))
        return self.peak * rise * fall

    def get_config(self):
        """The arguments."""
        return {
            "peak": self.peak,
            "updates": self.updates,
            "warmup_updates": self.warmup_updates,
            "schedule": self.schedule,
            "steps_per_update": self.steps_per_update,
        }
