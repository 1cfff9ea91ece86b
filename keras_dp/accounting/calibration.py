"""Epsilon of a planned training, and the settings that keep it within a target."""

import math
import warnings

from scipy import optimize

from keras_dp.accounting.checks import checked_choice, checked_duration, checked_target
from keras_dp.accounting.composition import ACCOUNTANTS, epsilon_of_phases
from keras_dp.accounting.curve import EpsilonCurve
from keras_dp.accounting.phases import MOST_NOISE, MOST_RELEASES

# Above this, epsilon is more likely a mistake in the settings than a choice.
_MISTAKEN_EPSILON = 100

_SIGMA_TOLERANCE = 1e-5


def compute_epsilon(
    *,
    num_examples,
    batch_size,
    noise_multiplier,
    delta,
    epochs=None,
    steps=None,
    sampling="poisson",
    accountant="rdp",
):
    """The epsilon of training with DP-SGD or any optimizer on its private gradients.

    After so many updates the weights, and all weights on the way, are (epsilon, delta)
    differentially private. The unit is one training example. Neighbouring data sets differ by
    adding or removing one example; for ``sampling="shuffle"`` by replacing one with a null
    example, since a missing one would shift the batches of all others.

    Args:
      num_examples: int >= 1, examples in the training set; counts as public.
      batch_size: int in [1, num_examples], expected examples in one update, over all replicas
        and accumulated micro-batches: the ``batch_size`` of the DP optimizer.
      noise_multiplier: float >= 0, standard deviation of the noise over the clipping norm.
      delta: float in (0, 1), well below 1 / num_examples.
      epochs: int >= 1, epochs of ceil(num_examples / batch_size) updates. Or:
      steps: int >= 1, updates.
      sampling: "poisson", "shuffle" or "full_batch", see above.
      accountant: "rdp", or "pld", which is tighter and slower (a second, at times several).

    Returns:
      float > 0. ``inf``, with a warning, if ``noise_multiplier`` is 0. Non-increasing in
      ``noise_multiplier`` and non-decreasing in ``steps``; an upper bound everywhere.

    Raises:
      ValueError: an argument of the wrong kind or outside its range.
    """
    curve = EpsilonCurve(num_examples, batch_size, noise_multiplier, delta, sampling)
    steps = checked_duration(epochs, steps, curve.steps_per_epoch)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    curve.warn(stacklevel=2)
    epsilon = _epsilon(curve, steps, accountant)
    if _MISTAKEN_EPSILON < epsilon < math.inf:
        warnings.warn(
            f"epsilon is {epsilon:.6g}. Above {_MISTAKEN_EPSILON} there is next to no formal "
            "protection: raise noise_multiplier or batch_size, or train for fewer updates.",
            stacklevel=2,
        )
    return epsilon


def compute_noise_multiplier(
    *,
    target_epsilon,
    num_examples,
    batch_size,
    delta,
    epochs=None,
    steps=None,
    sampling="poisson",
    accountant="rdp",
):
    """The least noise whose epsilon, by :func:`compute_epsilon`, stays within a target.

    Args:
      target_epsilon: float > 0.
      num_examples, batch_size, delta, epochs, steps, sampling, accountant: as for
        :func:`compute_epsilon`, which gives at most ``target_epsilon`` for the result.

    Returns:
      float > 0, the noise multiplier, at most 0.01 % above the smallest that will do. Never
      one whose epsilon is above the target.

    Raises:
      ValueError: an argument of the wrong kind or outside its range, or a target that no noise
        can reach.
    """
    target = checked_target(target_epsilon)
    most_noise = EpsilonCurve(num_examples, batch_size, MOST_NOISE, delta, sampling)
    steps = checked_duration(epochs, steps, most_noise.steps_per_epoch)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    most_noise.warn(stacklevel=2)
    least = _epsilon(most_noise, steps, accountant)
    if least > target:
        raise ValueError(
            f"No noise_multiplier reaches target_epsilon={target_epsilon!r} at delta={delta!r}: "
            f"however much noise there is, the accountant cannot certify less than {least:.3g}. "
            "Raise target_epsilon or delta."
        )

    def excess(log_sigma):
        sigma = math.exp(log_sigma)
        curve = EpsilonCurve(num_examples, batch_size, sigma, delta, sampling)
        return min(math.log(_epsilon(curve, steps, accountant) / target), 1e3)

    low, high = _bracket(excess, math.log(_guessed_sigma(most_noise, steps, target)))
    log_sigma = optimize.brentq(excess, low, high, xtol=_SIGMA_TOLERANCE)
    while excess(log_sigma) > 0:  # the root may lie on the wrong side by its tolerance
        log_sigma += _SIGMA_TOLERANCE
    return math.exp(log_sigma)


def _epsilon(curve, steps, accountant):
    return epsilon_of_phases([curve.phase(steps)], curve.delta, accountant)


def _guessed_sigma(curve, steps, epsilon):
    """Noise for epsilon if the losses were Gaussian: epsilon = rho + 2 sqrt(rho log(1 / delta)).

    Rho is the zero-concentrated DP of the run (Bun and Steinke 2016, arXiv 1605.02635).
    """
    cost = -math.log(curve.delta)
    rho = (math.sqrt(cost + epsilon) - math.sqrt(cost)) ** 2
    phase = curve.phase(steps)
    q = phase.sampling_probability if phase.sampling == "poisson" else 1.0
    releases = min(phase.releases, MOST_RELEASES)
    return 1 / math.sqrt(math.log1p(2 * rho / (releases * q**2)))


def _bracket(excess, start):
    """Logs of two noise multipliers, one with too large an epsilon, one without."""
    low = high = start
    while excess(high) > 0:
        low, high = high, high + math.log(1.5)
    while excess(low) <= 0:
        low, high = low - math.log(1.5), low
    return low, high
