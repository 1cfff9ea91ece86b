"""Epsilon of a planned training, and the settings that keep it within a target."""

import dataclasses
import functools
import math

from scipy import optimize

from keras_dp.accounting import advice
from keras_dp.accounting.checks import (
    checked_choice,
    checked_delta,
    checked_duration,
    checked_int,
    checked_target,
)
from keras_dp.accounting.composition import ACCOUNTANTS, Spent, epsilon_of_phases
from keras_dp.accounting.groups import epsilon_of_group
from keras_dp.accounting.phases import MOST_NOISE, MOST_RELEASES, NO_NOISE, Phase, steps_per_epoch

_SIGMA_TOLERANCE = 1e-5
_LOG_DELTA_TOLERANCE = 1e-3
_LEAST_LOG_DELTA = math.log(1e-300)
# PLD takes a second: a search by it ends when it knows a number to so much.
_PLD_TOLERANCE = 1e-3


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
    neighboring_relation=None,
    capacity=None,
    group_size=1,
):
    """The epsilon of training with DP-SGD or any optimizer on its private gradients.

    After so many updates the weights, and all weights on the way, are (epsilon, delta)
    differentially private. The unit is one training example, or whatever is clipped as one, such
    as a user.

    Args:
      num_examples: int >= 1, examples in the training set; counts as public.
      batch_size: int in [1, num_examples], expected examples in one update, over all replicas
        and accumulated micro-batches: the ``batch_size`` of the DP optimizer.
      noise_multiplier: float >= 0, standard deviation of the noise over the clipping norm.
      delta: float in (0, 1), well below 1 / num_examples.
      epochs: int >= 1, epochs of ceil(num_examples / batch_size) updates. Or:
      steps: int >= 1, updates.
      sampling: "poisson", "shuffle", "without_replacement" or "full_batch", how batches are
        formed; see :mod:`keras_dp.accounting.phases`.
      accountant: "rdp", or "pld", which is tighter and slower (a second, at times several).
      neighboring_relation: what neighbouring data sets differ by: "add_remove" one example,
        "zero_out" it (a null one replaces it) or "replace_one" by any other. None chooses that of
        the sampling: "zero_out" for "shuffle", since a missing example would shift the batches of
        all others; "replace_one" for "without_replacement"; "add_remove" otherwise.
      capacity: int >= 1, examples to which a larger Poisson draw is cut, or None.
      group_size: int >= 1, examples in which the data sets differ: 1, or those of one person. See
        :func:`keras_dp.accounting.epsilon_of_group`.

    Returns:
      float > 0. ``inf``, with a warning, if ``noise_multiplier`` is 0. Non-increasing in
      ``noise_multiplier`` and non-decreasing in ``steps``; an upper bound everywhere.

    Raises:
      ValueError: an argument of the wrong kind or outside its range.
    """
    phase = planned(
        epochs,
        steps,
        num_examples=num_examples,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        neighboring_relation=neighboring_relation,
        capacity=capacity,
    )
    delta = checked_delta(delta)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    group_size = checked_int("group_size", group_size, 1, "Count the examples of one person.")
    advice.warn_about_settings([phase], delta, stacklevel=2)
    if group_size > 1:
        epsilon = epsilon_of_group([phase], delta, group_size, accountant)
    else:
        epsilon = epsilon_of_phases([phase], delta, accountant)
        if accountant == "rdp":
            advice.warn_about_order(Spent([phase]), delta, stacklevel=2)
    advice.warn_about_epsilon(epsilon, stacklevel=2)
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
    neighboring_relation=None,
    capacity=None,
):
    """The least noise whose epsilon, by :func:`compute_epsilon`, stays within a target.

    Args:
      target_epsilon: float > 0.
      num_examples, batch_size, delta, epochs, steps, sampling, accountant, neighboring_relation,
        capacity: as for :func:`compute_epsilon`, which gives at most ``target_epsilon`` for the
        result.

    Returns:
      float > 0, the noise multiplier, at most 0.01 % above the smallest that will do. Never
      one whose epsilon is above the target.

    Raises:
      ValueError: an argument of the wrong kind or outside its range, or a target that no noise
        can reach.
    """
    target = checked_target(target_epsilon)

    def phase(noise_multiplier):
        return planned(
            epochs,
            steps,
            num_examples=num_examples,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            neighboring_relation=neighboring_relation,
            capacity=capacity,
        )

    most_noise = phase(MOST_NOISE)
    delta = checked_delta(delta)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    advice.warn_about_settings([most_noise], delta, stacklevel=2)
    least = epsilon_of_phases([most_noise], delta, accountant)
    if least > target:
        raise ValueError(
            f"No noise_multiplier reaches target_epsilon={target_epsilon!r} at delta={delta!r}: "
            f"however much noise there is, the accountant cannot certify less than {least:.3g}. "
            "Raise target_epsilon or delta."
        )

    def excess(log_sigma):
        epsilon = epsilon_of_phases([phase(math.exp(log_sigma))], delta, accountant)
        return min(math.log(epsilon / target), 1e3)

    low, high = _bracket(excess, math.log(_guessed_sigma(most_noise, target, delta)))
    log_sigma = optimize.brentq(excess, low, high, xtol=_SIGMA_TOLERANCE)
    while excess(log_sigma) > 0:  # the root may lie on the wrong side by its tolerance
        log_sigma += _SIGMA_TOLERANCE
    return math.exp(log_sigma)


def compute_steps(
    *,
    target_epsilon,
    num_examples,
    batch_size,
    noise_multiplier,
    delta,
    sampling="poisson",
    accountant="rdp",
    neighboring_relation=None,
    capacity=None,
):
    """The most updates whose epsilon, by :func:`compute_epsilon`, stays within a target.

    Args:
      target_epsilon: float > 0.
      num_examples, batch_size, noise_multiplier, delta, sampling, accountant,
        neighboring_relation, capacity: as for :func:`compute_epsilon`.

    Returns:
      int >= 1. With ``accountant="pld"`` up to 0.1 % fewer than the most.

    Raises:
      ValueError: an argument of the wrong kind or outside its range, or a target that a single
        update exceeds.
    """
    start = Phase(
        num_examples=num_examples,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        neighboring_relation=neighboring_relation,
        capacity=capacity,
        steps=1,
    )
    target, delta = checked_target(target_epsilon), checked_delta(delta)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    advice.warn_about_settings([start], delta, stacklevel=2)
    steps = most_steps(
        lambda steps: [dataclasses.replace(start, steps=steps)], target, delta, accountant
    )
    if steps == 0:
        one = epsilon_of_phases([start], delta, accountant)
        raise ValueError(
            f"Not one update stays within target_epsilon={target_epsilon!r}: the first costs "
            f"{one:.6g}. Raise target_epsilon, noise_multiplier or delta, or make batch_size "
            "smaller."
        )
    return steps


def compute_epochs(
    *,
    target_epsilon,
    num_examples,
    batch_size,
    noise_multiplier,
    delta,
    sampling="poisson",
    accountant="rdp",
    neighboring_relation=None,
    capacity=None,
):
    """The most epochs whose epsilon, by :func:`compute_epsilon`, stays within a target.

    Args:
      target_epsilon, num_examples, batch_size, noise_multiplier, delta, sampling, accountant,
        neighboring_relation, capacity: as for :func:`compute_steps`.

    Returns:
      int >= 1, epochs of ceil(num_examples / batch_size) updates.

    Raises:
      ValueError: as :func:`compute_steps`, or a target that the first epoch exceeds.
    """
    steps = compute_steps(
        target_epsilon=target_epsilon,
        num_examples=num_examples,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        delta=delta,
        sampling=sampling,
        accountant=accountant,
        neighboring_relation=neighboring_relation,
        capacity=capacity,
    )
    epoch = steps_per_epoch(num_examples, batch_size)
    if steps < epoch:
        raise ValueError(
            f"Not one epoch stays within target_epsilon={target_epsilon!r}, only {steps} of its "
            f"{epoch} updates. Raise target_epsilon, noise_multiplier or delta, or plan with "
            "keras_dp.compute_steps."
        )
    return steps // epoch


def compute_batch_size(
    *,
    target_epsilon,
    num_examples,
    noise_multiplier,
    delta,
    epochs=None,
    steps=None,
    sampling="poisson",
    accountant="rdp",
    neighboring_relation=None,
):
    """A large batch whose epsilon, by :func:`compute_epsilon`, stays within a target.

    With the noise multiplier given, a larger batch has a better signal and costs more.

    Args:
      target_epsilon: float > 0.
      num_examples, noise_multiplier, delta, epochs, steps, sampling, accountant,
        neighboring_relation: as for :func:`compute_epsilon`. Not "full_batch", which leaves
        nothing to choose.

    Returns:
      int in [1, num_examples]: the largest batch size, up to what rounding does. Where the number
      of updates is ceil(num_examples / batch_size) an epoch, epsilon is not quite monotone in it,
      and the result is one at which the next larger exceeds the target. With ``accountant="pld"``
      up to 0.1 % less.

    Raises:
      ValueError: an argument of the wrong kind or outside its range, or a target that a batch
        size of 1 exceeds.
    """
    if sampling == "full_batch":
        raise ValueError(
            'sampling="full_batch" leaves no batch_size to choose: it is num_examples. Pass '
            'sampling="poisson" or "shuffle", or solve for the noise with '
            "keras_dp.compute_noise_multiplier."
        )

    def phase(batch_size):
        return planned(
            epochs,
            steps,
            num_examples=num_examples,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            sampling=sampling,
            neighboring_relation=neighboring_relation,
        )

    smallest = phase(1)
    target, delta = checked_target(target_epsilon), checked_delta(delta)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    advice.warn_about_settings([smallest], delta, stacklevel=2)

    def within(batch_size, by):
        return epsilon_of_phases([phase(batch_size)], delta, by) <= target

    if not within(1, accountant):
        one = epsilon_of_phases([smallest], delta, accountant)
        raise ValueError(
            f"No batch_size stays within target_epsilon={target_epsilon!r}: a batch size of 1 "
            f"costs {one:.6g}. Raise target_epsilon, noise_multiplier or delta, or train for less."
        )
    start = 1
    if accountant == "pld":  # RDP is quick, and what stays within by RDP does by PLD
        start = _largest(lambda size: within(size, "rdp"), 1, num_examples, 0) or 1
    tolerance = _PLD_TOLERANCE if accountant == "pld" else 0
    return _largest(lambda size: within(size, accountant), start, num_examples, tolerance)


def compute_delta(
    *,
    target_epsilon,
    num_examples,
    batch_size,
    noise_multiplier,
    epochs=None,
    steps=None,
    sampling="poisson",
    accountant="rdp",
    neighboring_relation=None,
    capacity=None,
):
    """The least delta at which epsilon, by :func:`compute_epsilon`, stays within a target.

    Args:
      target_epsilon: float > 0.
      num_examples, batch_size, noise_multiplier, epochs, steps, sampling, accountant,
        neighboring_relation, capacity: as for :func:`compute_epsilon`.

    Returns:
      float in (0, 1), at most 1 % above the smallest that will do. At least 1e-300.

    Raises:
      ValueError: an argument of the wrong kind or outside its range, or a target that is exceeded
        at every delta below 1.
    """
    phase = planned(
        epochs,
        steps,
        num_examples=num_examples,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        neighboring_relation=neighboring_relation,
        capacity=capacity,
    )
    target = checked_target(target_epsilon)
    checked_choice("accountant", accountant, ACCOUNTANTS)
    most = math.log1p(-1e-9)

    def excess(log_delta):
        epsilon = epsilon_of_phases([phase], math.exp(log_delta), accountant)
        return min(math.log(epsilon / target), 1e3)

    if excess(most) > 0:
        raise ValueError(
            f"No delta below 1 reaches target_epsilon={target_epsilon!r}: this training costs "
            "more at each. Raise target_epsilon or noise_multiplier, or train for less."
        )
    if excess(_LEAST_LOG_DELTA) <= 0:
        return math.exp(_LEAST_LOG_DELTA)
    log_delta = optimize.brentq(excess, _LEAST_LOG_DELTA, most, xtol=_LOG_DELTA_TOLERANCE)
    while excess(log_delta) > 0:
        log_delta += _LOG_DELTA_TOLERANCE
    return math.exp(min(log_delta, most))


def most_steps(phases_after, target_epsilon, delta, accountant="rdp"):
    """The most updates that keep a training, whatever came before it, within a target.

    Args:
      phases_after: function from a number of updates, an int >= 0, to the list of :class:`Phase`
        after them, those of earlier training included. Epsilon must not fall with the number.
      target_epsilon: float > 0.
      delta: float in (0, 1).
      accountant: "rdp", or "pld" for up to 0.1 % fewer updates than it allows.

    Returns:
      int >= 0. 0 too if what came before exceeds the target by itself.
    """

    def within(steps, by):
        return epsilon_of_phases(phases_after(steps), delta, by) <= target_epsilon

    # RDP is quick, and what stays within by RDP does by PLD.
    steps = _largest(lambda steps: within(steps, "rdp"), 0, MOST_RELEASES, 0) or 0
    if accountant == "pld":
        by_pld = functools.partial(within, by="pld")
        steps = _largest(by_pld, steps, MOST_RELEASES, _PLD_TOLERANCE) or 0
    return steps


def _largest(allows, start, most, tolerance):
    """The largest int in [start, most] that is allowed, up to a relative tolerance, or None.

    Args:
      allows: function from int to bool: true, then false.
      start, most: ints; start is allowed, or nothing is.
      tolerance: float, how much smaller, relatively, the result may be.
    """
    if not allows(start):
        return None
    low, stride = start, max(1, start // 8)
    while low < most and allows(min(low + stride, most)):
        low, stride = min(low + stride, most), 2 * stride
    high = min(low + stride, most + 1)  # not allowed
    while high - low > max(1, tolerance * low):
        middle = (low + high) // 2
        low, high = (middle, high) if allows(middle) else (low, middle)
    return low


def planned(epochs, steps, **settings):
    """The phase of a function's arguments; its length is checked after all else."""
    start = Phase(**settings)
    steps = checked_duration(epochs, steps, start.steps_per_epoch)
    return dataclasses.replace(start, steps=steps)


def _guessed_sigma(phase, epsilon, delta):
    """Noise for epsilon if the losses were Gaussian: epsilon = rho + 2 sqrt(rho log(1 / delta)).

    Rho is the zero-concentrated DP of the run (Bun and Steinke 2016, arXiv 1605.02635).
    """
    cost = -math.log(delta)
    rho = (math.sqrt(cost + epsilon) - math.sqrt(cost)) ** 2
    q = 1.0 if phase.sampling in ("shuffle", "full_batch") else phase.sampling_probability
    releases = min(phase.releases, MOST_RELEASES)
    sigma = 1 / math.sqrt(math.log1p(2 * rho / (releases * q**2)))
    return min(max(sigma, 10 * NO_NOISE), MOST_NOISE)


def _bracket(excess, start):
    """Logs of two noise multipliers, one with too large an epsilon, one without."""
    low = high = start
    while excess(high) > 0:
        low, high = high, high + math.log(1.5)
    while excess(low) <= 0:
        low, high = low - math.log(1.5), low
    return low, high
