"""Epsilon of one kind of training as a function of its length."""

import dataclasses
import warnings

from keras_dp.accounting.checks import checked_delta
from keras_dp.accounting.composition import Spent
from keras_dp.accounting.phases import Phase


class EpsilonCurve:
    """Epsilon as a function of the number of updates, with all else fixed.

    Args:
      num_examples, batch_size, noise_multiplier, delta, sampling: as for
        :func:`compute_epsilon`. Nothing is warned about; see :meth:`warn`.
      **settings: other attributes of :class:`Phase`.

    Raises:
      ValueError: an argument of the wrong kind or outside its range.
    """

    def __init__(
        self, num_examples, batch_size, noise_multiplier, delta, sampling="poisson", **settings
    ):
        self.start = Phase(
            num_examples=num_examples,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            **settings,
        )
        self.delta = checked_delta(delta)

    @property
    def steps_per_epoch(self):
        """int, updates in one epoch."""
        return self.start.steps_per_epoch

    def phase(self, steps, epochs_begun=None):
        """The training after so many updates.

        Args:
          steps: int >= 0, updates.
          epochs_begun: int >= 0, passes over the shuffled data that were begun, if some were
            cut short. Matters for ``sampling="shuffle"`` alone.

        Returns:
          :class:`Phase`.

        Raises:
          ValueError: not such numbers.
        """
        return dataclasses.replace(self.start, steps=steps, epochs_begun=epochs_begun)

    def epsilon(self, steps, epochs_begun=None):
        """Epsilon after so many updates, by RDP.

        Args:
          steps, epochs_begun: as for :meth:`phase`.

        Returns:
          float: 0.0 if there was no update, and above 0 otherwise.

        Raises:
          ValueError: not such numbers.
        """
        return Spent([self.phase(steps, epochs_begun)]).epsilon(self.delta)

    def pld_epsilon(self, steps, epochs_begun=None):
        """Epsilon after so many updates, by privacy loss distributions.

        Args:
          steps, epochs_begun: as for :meth:`phase`.

        Returns:
          float, at most what :meth:`epsilon` returns.
        """
        return Spent([self.phase(steps, epochs_begun)]).pld_epsilon(self.delta)

    def warn(self, stacklevel=1):
        """Warns about settings under which epsilon says nothing or little.

        Args:
          stacklevel: int, whose line the warning shows: 1 for the caller's, 2 for that of the
            caller's caller, as in ``warnings.warn``.
        """
        if self.start.noise_multiplier == 0:
            warnings.warn(
                "NOT PRIVATE: noise_multiplier is 0, so epsilon is infinite. Use it to debug only.",
                stacklevel=stacklevel + 1,
            )
        num_examples = self.start.num_examples
        if self.delta >= 1 / num_examples:
            warnings.warn(
                f"delta={self.delta:g} is not below 1 / num_examples = "
                f"{1 / num_examples:.3g}: publishing one random example in full would satisfy "
                "such a guarantee. Choose a smaller delta.",
                stacklevel=stacklevel + 1,
            )
