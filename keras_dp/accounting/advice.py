"""Warnings about settings under which epsilon says little."""

import math
import warnings

from keras_dp import renyi

# Above this, epsilon is more likely a mistake in the settings than a choice.
_MISTAKEN_EPSILON = 100


def warn_about_settings(phases, delta, stacklevel=1):
    """Warns if there is no noise, or delta is so large that the guarantee is empty.

    Args:
      phases: list of :class:`Phase`, at least one.
      delta: float in (0, 1).
      stacklevel: int, whose line the warning shows: 1 for the caller's, 2 for that of the caller's
        caller, as in ``warnings.warn``.
    """
    if any(phase.noise_multiplier == 0 for phase in phases):
        warnings.warn(
            "NOT PRIVATE: noise_multiplier is 0, so epsilon is infinite. Use it to debug only.",
            stacklevel=stacklevel + 1,
        )
    num_examples = min(phase.num_examples for phase in phases)
    if delta >= 1 / num_examples:
        warnings.warn(
            f"delta={delta:g} is not below 1 / num_examples = {1 / num_examples:.3g}: publishing "
            "one random example in full would satisfy such a guarantee. Choose a smaller delta.",
            stacklevel=stacklevel + 1,
        )


def warn_about_epsilon(epsilon, stacklevel=1):
    """Warns if an epsilon protects next to nothing."""
    if _MISTAKEN_EPSILON < epsilon < math.inf:
        warnings.warn(
            f"epsilon is {epsilon:.6g}. Above {_MISTAKEN_EPSILON} there is next to no formal "
            "protection: raise noise_multiplier or batch_size, or train for fewer updates.",
            stacklevel=stacklevel + 1,
        )


def warn_about_order(spent, delta, stacklevel=1):
    """Warns if a Renyi order beyond those that are tried might give a smaller epsilon.

    Args:
      spent: :class:`keras_dp.accounting.composition.Spent`.
      delta: float in (0, 1).
      stacklevel: as in :func:`warn_about_settings`.
    """
    epsilon = spent.epsilon(delta)
    if not renyi.LEAST_EPSILON < epsilon < math.inf:
        return
    order, at_edge = renyi.best_order(spent.rdp, delta)
    if at_edge:
        warnings.warn(
            f"epsilon={epsilon:.6g} holds, but a smaller one may too: the best Renyi order, "
            f'{order:g}, is at the edge of those that are tried. accountant="pld" has no orders.',
            stacklevel=stacklevel + 1,
        )
