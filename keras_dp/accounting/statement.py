"""What a training run guarantees, for people."""

import math

from keras_dp.accounting.checks import checked_duration
from keras_dp.accounting.composition import Spent
from keras_dp.accounting.curve import EpsilonCurve

# Under this, epsilon is taken for reasonable protection (Ponomareva et al. 2023, "How to DP-fy
# ML", arXiv 2303.00654, section 5.2).
_WEAK_EPSILON = 10


def privacy_statement(
    *,
    num_examples,
    batch_size,
    noise_multiplier,
    delta,
    epochs=None,
    steps=None,
    sampling="poisson",
):
    """What a training run guarantees, for people: one paragraph of plain words.

    It names epsilon (by RDP, and by PLD where that takes little time), delta, the unit that is
    protected, the neighbouring relation, the sampling that is assumed, the mechanism and the
    number of updates, and what is not covered.

    Args:
      num_examples, batch_size, noise_multiplier, delta, epochs, steps, sampling: as for
        :func:`compute_epsilon`.

    Returns:
      str. It opens with "NOT PRIVATE" if ``noise_multiplier`` is 0.

    Raises:
      ValueError: an argument of the wrong kind or outside its range.
    """
    curve = EpsilonCurve(num_examples, batch_size, noise_multiplier, delta, sampling)
    steps = checked_duration(epochs, steps, curve.steps_per_epoch)
    curve.warn(stacklevel=2)
    return statement(curve, steps)


def statement(curve, steps, epochs_begun=None):
    """The paragraph of :func:`privacy_statement`.

    Args:
      curve: :class:`EpsilonCurve`.
      steps: int >= 0, updates.
      epochs_begun: as for :meth:`EpsilonCurve.releases`.

    Returns:
      str.
    """
    return " ".join(
        [
            _guarantee(curve, steps, epochs_begun),
            _unit(curve),
            _mechanism(curve, steps),
            _assumed_sampling(curve, steps, epochs_begun),
            _NOT_COVERED,
        ]
    )


def _guarantee(curve, steps, epochs_begun):
    epsilon = curve.epsilon(steps, epochs_begun)
    if math.isinf(epsilon):
        return (
            f"NOT PRIVATE: epsilon is infinite, since noise_multiplier is "
            f"{curve.start.noise_multiplier:g}. What follows describes the run; it promises "
            "nothing."
        )
    text = f"Privacy: epsilon = {_shown(epsilon)} at delta = {curve.delta:g} by Renyi DP (RDP)"
    if Spent([curve.phase(steps, epochs_begun)]).pld_is_quick(curve.delta):
        pld_epsilon = curve.pld_epsilon(steps, epochs_begun)
        if pld_epsilon < epsilon:
            shown = _shown(pld_epsilon)
            text += f"; {shown} by privacy loss distributions (PLD), which are tighter"
    if epsilon > _WEAK_EPSILON:
        text += f". This is weak: an epsilon above {_WEAK_EPSILON} promises little"
    return text + "."


def _shown(epsilon):
    """Four digits, rounded up: what is printed is a bound too."""
    if epsilon == 0:
        return "0"
    unit = 10.0 ** min(math.floor(math.log10(epsilon)) - 3, 0)
    rounded = math.ceil(epsilon / unit) * unit
    return f"{rounded:.4g}" if rounded < 1000 else str(math.ceil(rounded))


def _unit(curve):
    if curve.start.sampling == "shuffle":
        differ = "by one example that a null one replaces (zero-out); their number is public"
    else:
        differ = "by one example that is added or removed"
    return f"The unit protected is one training example: neighbouring data sets differ {differ}."


def _mechanism(curve, steps):
    updates = "1 update" if steps == 1 else f"{steps} updates"
    return (
        f"Mechanism: {updates}, each with Gaussian noise of {curve.start.noise_multiplier:g} times "
        "the sensitivity on the sum of the clipped per-example gradients. The weights after every "
        "update are covered, whatever the optimizer makes of the noisy gradient: momentum, Adam "
        "or LAMB do not change epsilon."
    )


def _assumed_sampling(curve, steps, epochs_begun):
    if curve.start.sampling == "poisson":
        return (
            "Sampling assumed: Poisson, where every update draws each example independently with "
            f"probability {curve.start.batch_size}/{curve.start.num_examples} = "
            f"{curve.start.sampling_probability:.4g}. For batches formed in another way, such as "
            "fixed batches of shuffled data, this epsilon does not hold."
        )
    if curve.start.sampling == "shuffle":
        epochs = curve.phase(steps, epochs_begun).releases
        begun = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        return (
            f"Sampling assumed: fixed batches of {curve.start.num_examples} shuffled examples, "
            f"each of which takes part in one update of each of {begun}. No amplification by "
            "sampling is claimed."
        )
    return f"Sampling assumed: none, every update uses all {curve.start.num_examples} examples."


_NOT_COVERED = (
    "Not covered: the loss, metrics and gradient norms that training logs, which are computed "
    "from the data without noise; the search for hyperparameters; early stopping, or the choice "
    "of a checkpoint, by a figure computed on private data."
)
