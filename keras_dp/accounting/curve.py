"""Epsilon of one kind of training as a function of its length."""

import dataclasses

from keras_dp.accounting.advice import warn_about_settings
from keras_dp.accounting.checks import checked_delta
from keras_dp.accounting.composition import Spent
from keras_dp.accounting.phases import Phase
from keras_dp.accounting.statement import statement_of_phases


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
        """Warns about settings under which epsilon says nothing or little."""
        warn_about_settings([self.start], self.delta, stacklevel + 1)


def statement(curve, steps, epochs_begun=None):
    """The paragraph of :func:`privacy_statement`."""
    return statement_of_phases([curve.phase(steps, epochs_begun)], curve.delta)
