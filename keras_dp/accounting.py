"""What a training run costs in privacy, and the noise that a budget asks for.

A run is described by the events of dp-accounting, one for each release that an example can
take part in, and the accountants compose them: Renyi DP (`keras_dp.renyi`) or privacy loss
distributions (PLD). Three ways to form batches are known:

``"poisson"``     every update draws each example independently with probability
                  batch_size / num_examples. Amplification by sampling counts.
``"shuffle"``     fixed batches of a shuffled data set. No amplification: an example takes
                  part in one update of every epoch, and that update is all that it shows in.
``"full_batch"``  every update uses all examples.

An epoch is ``steps_per_epoch(num_examples, batch_size)`` updates, everywhere.
"""

import functools
import math
import numbers
import warnings

import dp_accounting
from dp_accounting import pld as dp_accounting_pld
from scipy import optimize

from keras_dp import renyi

SAMPLINGS = ("poisson", "shuffle", "full_batch")
ACCOUNTANTS = ("rdp", "pld")

# Under 10, epsilon is taken for reasonable protection (Ponomareva et al. 2023, "How to DP-fy
# ML", arXiv 2303.00654, section 5.2); over 100, it is more likely a mistake in the settings.
_WEAK_EPSILON = 10
_MISTAKEN_EPSILON = 100

# Noise multipliers between which every intermediate number can be represented. Epsilon falls
# with noise, so the bounds stand in for whatever lies outside.
_NO_NOISE, _MOST_NOISE = 1e-100, 1e10
_RAREST_SAMPLING = 1e-50
_MOST_RELEASES = 10**150

# PLD: probabilities from convolutions by FFT are off by about 2e-17 per composed release.
_FFT_ERROR_PER_RELEASE = 1e-16
_PLD_MOST_RELEASES = 10**7
_PLD_MOST_POINTS, _PLD_QUICK_POINTS = 1e6, 3e5

_SIGMA_TOLERANCE = 1e-5


def steps_per_epoch(num_examples, batch_size):
    """Updates in one epoch: ceil(num_examples / batch_size).

    Args:
      num_examples: int >= 1.
      batch_size: int in [1, num_examples], expected examples in one update.

    Returns:
      int >= 1.

    Raises:
      ValueError: not such numbers.
    """
    num_examples, batch_size = _checked_sizes(num_examples, batch_size)
    return -(-num_examples // batch_size)


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
    steps = _checked_duration(curve, epochs, steps)
    _checked_choice("accountant", accountant, ACCOUNTANTS)
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
    target = _checked_number(
        "target_epsilon",
        target_epsilon,
        lambda value: 0 < value < math.inf,
        "a finite number above 0",
        "Pass the largest epsilon that you accept, for example 3.0.",
    )
    most_noise = EpsilonCurve(num_examples, batch_size, _MOST_NOISE, delta, sampling)
    steps = _checked_duration(most_noise, epochs, steps)
    _checked_choice("accountant", accountant, ACCOUNTANTS)
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
    return curve.epsilon(steps) if accountant == "rdp" else curve.pld_epsilon(steps)


def _guessed_sigma(curve, steps, epsilon):
    """Noise for epsilon if the losses were Gaussian: epsilon = rho + 2 sqrt(rho log(1 / delta)).

    Rho is the zero-concentrated DP of the run (Bun and Steinke 2016, arXiv 1605.02635).
    """
    cost = -math.log(curve.delta)
    rho = (math.sqrt(cost + epsilon) - math.sqrt(cost)) ** 2
    q = curve.sampling_probability if curve.sampling == "poisson" else 1.0
    releases = min(curve.releases(steps), _MOST_RELEASES)
    return 1 / math.sqrt(math.log1p(2 * rho / (releases * q**2)))


def _bracket(excess, start):
    """Logs of two noise multipliers, one with too large an epsilon, one without."""
    low = high = start
    while excess(high) > 0:
        low, high = high, high + math.log(1.5)
    while excess(low) <= 0:
        low, high = low - math.log(1.5), low
    return low, high


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
    steps = _checked_duration(curve, epochs, steps)
    curve.warn(stacklevel=2)
    return statement(curve, steps)


class EpsilonCurve:
    """Epsilon as a function of the number of updates, with all else fixed.

    The divergences of one update are found once, at the first call of :meth:`epsilon`; composing
    them is a multiplication. So later calls take some 20 microseconds. The result is that of
    :func:`compute_epsilon`.

    Args:
      num_examples, batch_size, noise_multiplier, delta, sampling: as for
        :func:`compute_epsilon`. Nothing is warned about; see :meth:`warn`.

    Raises:
      ValueError: an argument of the wrong kind or outside its range.
    """

    def __init__(self, num_examples, batch_size, noise_multiplier, delta, sampling="poisson"):
        self.num_examples, self.batch_size = _checked_sizes(num_examples, batch_size)
        self.noise_multiplier = _checked_number(
            "noise_multiplier",
            noise_multiplier,
            lambda value: 0 <= value < math.inf,
            "a finite number of at least 0",
            "It is the standard deviation of the noise over l2_norm_clip; "
            "keras_dp.compute_noise_multiplier finds it for a target epsilon.",
        )
        self.delta = _checked_number(
            "delta",
            delta,
            lambda value: 0 < value < 1,
            "a number above 0 and below 1",
            "It is the probability of a worse leak than epsilon says: choose it well below "
            "1 / num_examples, for example 1e-5 for 10000 examples.",
        )
        self.sampling = _checked_choice("sampling", sampling, SAMPLINGS)
        if sampling == "full_batch" and self.batch_size != self.num_examples:
            raise ValueError(
                f'sampling="full_batch" means that every update uses all examples, but '
                f"batch_size={batch_size} and num_examples={num_examples}. Make them equal, or "
                'pass sampling="poisson" or "shuffle".'
            )
        self.steps_per_epoch = steps_per_epoch(self.num_examples, self.batch_size)

    @functools.cached_property
    def _rdp(self):
        return renyi.divergences(self._release)

    @property
    def _release(self):
        """One release that an example may take part in, as an event of dp-accounting."""
        if self.noise_multiplier < _NO_NOISE:
            return dp_accounting.NonPrivateDpEvent()
        gaussian = dp_accounting.GaussianDpEvent(min(self.noise_multiplier, _MOST_NOISE))
        if self.sampling != "poisson" or self.sampling_probability == 1:
            return gaussian
        return dp_accounting.PoissonSampledDpEvent(self.sampling_probability, gaussian)

    @property
    def sampling_probability(self):
        """batch_size / num_examples."""
        return max(self.batch_size / self.num_examples, _RAREST_SAMPLING)

    def releases(self, steps, epochs_begun=None):
        """How many of the updates an example may take part in, at most.

        Args:
          steps: int >= 0, updates.
          epochs_begun: int >= 0, passes over the shuffled data that were begun, if some were
            cut short. Matters for ``sampling="shuffle"`` alone.

        Returns:
          int: ``steps``; for ``sampling="shuffle"`` the epochs begun, which are no fewer than
          ceil(steps / steps_per_epoch).
        """
        if self.sampling != "shuffle":
            return steps
        return max(-(-steps // self.steps_per_epoch), epochs_begun or 0)

    def epsilon(self, steps, epochs_begun=None):
        """Epsilon after so many updates, by RDP.

        Args:
          steps: int >= 0, updates.
          epochs_begun: as for :meth:`releases`.

        Returns:
          float: 0.0 if there was no update, and above 0 otherwise.

        Raises:
          ValueError: not such numbers.
        """
        steps = _checked_int("steps", steps, 0, _STEPS_ADVICE)
        if epochs_begun is not None:
            epochs_begun = _checked_int("epochs_begun", epochs_begun, 0, "Count passes begun.")
        releases = self.releases(steps, epochs_begun)
        if releases == 0:
            return 0.0
        return renyi.epsilon_of(min(releases, _MOST_RELEASES) * self._rdp, self.delta)

    def pld_epsilon(self, steps, epochs_begun=None):
        """Epsilon after so many updates, by privacy loss distributions.

        The distribution of dp-accounting is pessimistic (Doroshenko et al. 2022, "Connect the
        dots", arXiv 2207.04380). Where it cannot be computed soundly in reasonable time and
        memory (epsilon above 1000, more than 1e7 releases, a delta near the rounding errors of
        the convolutions, a grid that dp-accounting refuses), or is not tighter, this is the value
        of RDP, also a valid bound.

        Args:
          steps, epochs_begun: as for :meth:`epsilon`.

        Returns:
          float, at most what :meth:`epsilon` returns.
        """
        rdp_epsilon = self.epsilon(steps, epochs_begun)
        releases = self.releases(steps, epochs_begun)
        if not self._pld_is_sound(releases, rdp_epsilon):
            return rdp_epsilon
        fft_error = _FFT_ERROR_PER_RELEASE * releases
        spacing, _ = self._pld_grid(releases, rdp_epsilon)
        accountant = dp_accounting_pld.PLDAccountant(value_discretization_interval=spacing)
        try:
            accountant.compose(self._release, releases)
        except ValueError as error:
            # dp-accounting refuses grids on which rounding errors show; 0.5.0 often, 0.6.0 rarely.
            if "non-increasing" not in str(error):
                raise
            return rdp_epsilon
        epsilon = float(accountant.get_epsilon(self.delta - fft_error))
        return min(max(epsilon, renyi.LEAST_EPSILON), rdp_epsilon)

    def pld_is_quick(self, steps, epochs_begun=None):
        """Whether :meth:`pld_epsilon` takes less than about a second.

        Args:
          steps, epochs_begun: as for :meth:`epsilon`.

        Returns:
          bool.
        """
        rdp_epsilon = self.epsilon(steps, epochs_begun)
        releases = self.releases(steps, epochs_begun)
        if not self._pld_is_sound(releases, rdp_epsilon):
            return True
        _, points = self._pld_grid(releases, rdp_epsilon)
        return points <= _PLD_QUICK_POINTS

    def _pld_is_sound(self, releases, rdp_epsilon):
        """Whether rounding errors and truncated tails stay well below delta, and the grid fits."""
        return (
            renyi.LEAST_EPSILON < rdp_epsilon < 1000
            and releases <= _PLD_MOST_RELEASES
            and self.delta >= 10 * _FFT_ERROR_PER_RELEASE * releases
            and self.delta >= 1e-12  # dp-accounting truncates tails of about 1e-15
        )

    def _pld_grid(self, releases, rdp_epsilon):
        """The grid of privacy losses: its spacing, and a measure of the points to compute.

        Fine enough for a bound within about 1 % of the exact one, unless time or memory forbid
        it. dp-accounting composes Gaussians by adding up their precision; all else goes on the
        grid one release at a time and is composed there. A loss below the spacing is overstated
        then, and the points are about releases * typical loss / spacing.
        """
        if isinstance(self._release, dp_accounting.GaussianDpEvent):
            sigma = self._release.noise_multiplier / math.sqrt(releases)
            spacing, composed_loss = rdp_epsilon / 1e4, 0.0
        else:
            sigma = self._release.event.noise_multiplier
            typical_loss = math.sqrt(2 * self._rdp[0] / renyi.ORDERS[0])
            spacing = min(rdp_epsilon / 1e4, typical_loss / 10)
            composed_loss = releases * typical_loss / 4
        largest_loss = max(1 / sigma**2 + 20 / sigma, 2 * rdp_epsilon)
        spacing = max(spacing, largest_loss / _PLD_MOST_POINTS, composed_loss / _PLD_MOST_POINTS)
        return spacing, (largest_loss + composed_loss) / spacing

    def warn(self, stacklevel=1):
        """Warns about settings under which epsilon says nothing or little.

        Args:
          stacklevel: int, whose line the warning shows: 1 for the caller's, 2 for that of the
            caller's caller, as in ``warnings.warn``.
        """
        if self.noise_multiplier == 0:
            warnings.warn(
                "NOT PRIVATE: noise_multiplier is 0, so epsilon is infinite. Use it to debug only.",
                stacklevel=stacklevel + 1,
            )
        if self.delta >= 1 / self.num_examples:
            warnings.warn(
                f"delta={self.delta:g} is not below 1 / num_examples = "
                f"{1 / self.num_examples:.3g}: publishing one random example in full would satisfy "
                "such a guarantee. Choose a smaller delta.",
                stacklevel=stacklevel + 1,
            )


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
            f"{curve.noise_multiplier:g}. What follows describes the run; it promises nothing."
        )
    text = f"Privacy: epsilon = {_shown(epsilon)} at delta = {curve.delta:g} by Renyi DP (RDP)"
    if curve.pld_is_quick(steps, epochs_begun):
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
    if curve.sampling == "shuffle":
        differ = "by one example that a null one replaces (zero-out); their number is public"
    else:
        differ = "by one example that is added or removed"
    return f"The unit protected is one training example: neighbouring data sets differ {differ}."


def _mechanism(curve, steps):
    updates = "1 update" if steps == 1 else f"{steps} updates"
    return (
        f"Mechanism: {updates}, each with Gaussian noise of {curve.noise_multiplier:g} times the "
        "sensitivity on the sum of the clipped per-example gradients. The weights after every "
        "update are covered, whatever the optimizer makes of the noisy gradient: momentum, Adam "
        "or LAMB do not change epsilon."
    )


def _assumed_sampling(curve, steps, epochs_begun):
    if curve.sampling == "poisson":
        return (
            "Sampling assumed: Poisson, where every update draws each example independently with "
            f"probability {curve.batch_size}/{curve.num_examples} = "
            f"{curve.sampling_probability:.4g}. For batches formed in another way, such as fixed "
            "batches of shuffled data, this epsilon does not hold."
        )
    if curve.sampling == "shuffle":
        epochs = curve.releases(steps, epochs_begun)
        begun = "1 epoch" if epochs == 1 else f"{epochs} epochs"
        return (
            f"Sampling assumed: fixed batches of {curve.num_examples} shuffled examples, each of "
            f"which takes part in one update of each of {begun}. No amplification by sampling is "
            "claimed."
        )
    return f"Sampling assumed: none, every update uses all {curve.num_examples} examples."


_NOT_COVERED = (
    "Not covered: the loss, metrics and gradient norms that training logs, which are computed "
    "from the data without noise; the search for hyperparameters; early stopping, or the choice "
    "of a checkpoint, by a figure computed on private data."
)


_STEPS_ADVICE = "Count updates, the optimizer's iterations."


def _checked_sizes(num_examples, batch_size):
    num_examples = _checked_int("num_examples", num_examples, 1, "Pass the size of the data set.")
    batch_size = _checked_int(
        "batch_size", batch_size, 1, "Pass the expected number of examples in one update."
    )
    if batch_size > num_examples:
        raise ValueError(
            f"batch_size={batch_size} is larger than num_examples={num_examples}, but an example "
            "takes part at most once in an update. Pass a batch_size, over all replicas and "
            "accumulated micro-batches, of at most num_examples."
        )
    return num_examples, batch_size


def _checked_duration(curve, epochs, steps):
    """The number of updates."""
    if (epochs is None) == (steps is None):
        raise ValueError(
            f"Exactly one of epochs and steps is needed; received epochs={epochs!r} and "
            f"steps={steps!r}. Pass epochs=, or the number of updates as steps=."
        )
    if steps is not None:
        return _checked_int("steps", steps, 1, _STEPS_ADVICE)
    if isinstance(epochs, numbers.Real) and not isinstance(epochs, numbers.Integral):
        epochs = int(epochs) if float(epochs).is_integer() else epochs
    advice = "For a part of an epoch pass the number of updates as steps=."
    return _checked_int("epochs", epochs, 1, advice) * curve.steps_per_epoch


def _checked_int(name, value, least, advice):
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise ValueError(
            f"{name} must be a whole number of at least {least}; received {value!r} "
            f"({type(value).__name__}). {advice}"
        )
    return int(value)


def _checked_number(name, value, allows, allowed, advice):
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = _as_float(value)
    if not allows(number):
        raise ValueError(
            f"{name} must be {allowed}; received {value!r} ({type(value).__name__}). {advice}"
        )
    return number


def _as_float(value):
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _checked_choice(name, value, choices):
    if not isinstance(value, str) or value not in choices:
        options = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {options}; received {value!r}.")
    return value
