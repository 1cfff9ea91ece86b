"""What a training run guarantees: as numbers for programs, in words for people."""

import importlib.metadata
import math

from keras_dp import renyi
from keras_dp.accounting import advice
from keras_dp.accounting.calibration import planned
from keras_dp.accounting.checks import checked_delta, checked_int
from keras_dp.accounting.composition import Spent
from keras_dp.accounting.groups import epsilon_of_group, is_exact
from keras_dp.version import __version__

# Under this, epsilon is taken for reasonable protection (Ponomareva et al. 2023, "How to DP-fy
# ML", arXiv 2303.00654, section 5.2).
_WEAK_EPSILON = 10


def privacy_report(
    *,
    num_examples,
    batch_size,
    noise_multiplier,
    delta,
    epochs=None,
    steps=None,
    sampling="poisson",
    neighboring_relation=None,
    capacity=None,
    unit="example",
    examples_per_user=None,
    group_size=None,
):
    """What a training run guarantees, as a dict that ``json.dumps`` takes.

    Args:
      num_examples, batch_size, noise_multiplier, delta, epochs, steps, sampling,
        neighboring_relation, capacity: as for :func:`compute_epsilon`.
      unit: "example", or "user" if gradients are clipped per user. Only the words depend on it.
      examples_per_user: int >= 1, examples that a user has in an update at most, with
        ``unit="user"``. Only the words depend on it.
      group_size: int >= 2, units that one person owns at most, to add what holds for all of them
        together; or None.

    Returns:
      dict. ``private``: bool, False without noise. ``epsilon_rdp``: float or None if infinite.
      ``epsilon_pld``: float, or None where it would take more than about a second, says no more
      than RDP or cannot be computed. ``delta``. ``rdp_order``: float or None, the Renyi order of
      ``epsilon_rdp``. ``neighboring_relation``. ``unit``: str, in words. ``group``: None, or a
      dict with ``size``, ``epsilon_rdp``, ``delta`` and ``exact``, see
      :func:`keras_dp.accounting.epsilon_of_group`. ``phases``: list of dicts, see
      :meth:`Phase.to_dict`. ``not_covered``: list of str. ``versions``: dict. ``statement``: str,
      the text of :func:`privacy_statement`.

    Raises:
      ValueError: an argument of the wrong kind or outside its range.
    """
    return _reported(
        delta,
        group_size,
        epochs,
        steps,
        num_examples=num_examples,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        neighboring_relation=neighboring_relation,
        capacity=capacity,
        unit=unit,
        examples_per_user=examples_per_user,
    )


def privacy_statement(
    *,
    num_examples,
    batch_size,
    noise_multiplier,
    delta,
    epochs=None,
    steps=None,
    sampling="poisson",
    neighboring_relation=None,
    capacity=None,
    unit="example",
    examples_per_user=None,
    group_size=None,
):
    """What a training run guarantees, for people: one paragraph of plain words.

    It names epsilon (by RDP, and by PLD where that takes little time), delta, the unit that is
    protected, the neighbouring relation, the sampling that is assumed, the mechanism and the
    number of updates, and what is not covered.

    Args:
      num_examples, batch_size, noise_multiplier, delta, epochs, steps, sampling,
        neighboring_relation, capacity, unit, examples_per_user, group_size: as for
        :func:`privacy_report`.

    Returns:
      str. It opens with "NOT PRIVATE" if ``noise_multiplier`` is 0.

    Raises:
      ValueError: an argument of the wrong kind or outside its range.
    """
    return _reported(
        delta,
        group_size,
        epochs,
        steps,
        num_examples=num_examples,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        neighboring_relation=neighboring_relation,
        capacity=capacity,
        unit=unit,
        examples_per_user=examples_per_user,
    )["statement"]


def _reported(delta, group_size, epochs, steps, **settings):
    phase = planned(epochs, steps, **settings)
    delta = checked_delta(delta)
    if group_size is not None:
        group_size = checked_int("group_size", group_size, 2, "Count the units of one person.")
    advice.warn_about_settings([phase], delta, stacklevel=3)
    return report_of_phases([phase], delta, group_size)


def report_of_phases(phases, delta, group_size=None):
    """The dict of :func:`privacy_report` for phases that follow each other.

    Args:
      phases: list of :class:`Phase`, at least one. Nothing is warned about.
      delta: float in (0, 1).
      group_size: as for :func:`privacy_report`.

    Returns:
      dict.

    Raises:
      ValueError: no phases, phases of different units, or without a relation in common.
    """
    spent = Spent(phases)
    _check_units(spent.phases)
    delta = checked_delta(delta)
    epsilon = spent.epsilon(delta)
    private = math.isfinite(epsilon)
    pld_epsilon = order = group = None
    if private and spent.releases:
        order, _ = renyi.best_order(spent.rdp, delta)
        if spent.pld_is_quick(delta):
            pld_epsilon = spent.pld_epsilon(delta)
            pld_epsilon = pld_epsilon if pld_epsilon < epsilon else None
    if group_size is not None:
        group_epsilon = epsilon_of_group(spent.phases, delta, group_size)
        group = {
            "size": group_size,
            "epsilon_rdp": group_epsilon if math.isfinite(group_epsilon) else None,
            "delta": delta,
            "exact": is_exact(spent.phases, group_size),
        }
    report = {
        "private": private,
        "epsilon_rdp": epsilon if private else None,
        "epsilon_pld": pld_epsilon,
        "delta": delta,
        "rdp_order": order,
        "neighboring_relation": spent.relation,
        "unit": _unit(spent.phases[0]),
        "group": group,
        "phases": [phase.to_dict() for phase in spent.phases],
        "not_covered": list(_NOT_COVERED),
        "versions": {
            "keras_dp": __version__,
            "dp-accounting": importlib.metadata.version("dp-accounting"),
        },
    }
    return report | {"statement": _words(report, spent.phases)}


def statement_of_phases(phases, delta, group_size=None):
    """The paragraph of :func:`privacy_statement` for phases that follow each other.

    Args:
      phases, delta, group_size: as for :func:`report_of_phases`.

    Returns:
      str.
    """
    return report_of_phases(phases, delta, group_size)["statement"]


def _check_units(phases):
    if not phases:
        raise ValueError(
            "There is nothing to state a guarantee for: received no phases. Pass at least one, "
            "with steps=0 if nothing was released."
        )
    units = sorted({_unit(phase) for phase in phases})
    if len(units) > 1:
        raise ValueError(
            f"The phases protect different units, {' and '.join(units)}, and a guarantee names "
            "one. Make a report for each kind."
        )


def _words(report, phases):
    alone = len(phases) == 1
    word = phases[0].unit
    sentences = [_guarantee(report, phases), _neighbours(report, word)]
    if report["group"] is not None:
        sentences.append(_group(report["group"], word))
    for number, phase in enumerate(phases, 1):
        label = "" if alone else f" in phase {number} of {len(phases)}"
        sentences += [_mechanism(phase, label), _assumed_sampling(phase, label)]
    sentences.append(_POST_PROCESSING)
    sentences.append("Not covered: " + "; ".join(_NOT_COVERED) + ".")
    return " ".join(sentences)


def _guarantee(report, phases):
    if not report["private"]:
        noise = " and ".join(f"{p.noise_multiplier:g}" for p in phases if p.steps)
        return (
            f"NOT PRIVATE: epsilon is infinite, since noise_multiplier is {noise}. What follows "
            "describes the run; it promises nothing."
        )
    epsilon = report["epsilon_rdp"]
    text = f"Privacy: epsilon = {_shown(epsilon)} at delta = {report['delta']:g} by Renyi DP (RDP)"
    if report["epsilon_pld"] is not None:
        shown = _shown(report["epsilon_pld"])
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


def _unit(phase):
    if phase.unit == "example":
        return "one training example"
    if phase.examples_per_user is None:
        return "one user"
    return f"one user, who counts with at most {phase.examples_per_user} examples in an update"


def _neighbours(report, word):
    differ = {
        "add_remove": f"by one {word} that is added or removed",
        "zero_out": f"by one {word} that a null one replaces (zero-out); their number is public",
        "replace_one": f"by one {word} that any other one replaces; their number is public",
    }[report["neighboring_relation"]]
    return f"The unit protected is {report['unit']}: neighbouring data sets differ {differ}."


def _group(group, word):
    owner = "a person with" if word == "example" else "a group of"
    if group["epsilon_rdp"] is None:
        return f"For {owner} {group['size']} {word}s nothing is promised."
    way = "" if group["exact"] else ", by the general rule for groups, which is loose"
    return (
        f"For {owner} up to {group['size']} {word}s, epsilon = {_shown(group['epsilon_rdp'])} at "
        f"delta = {group['delta']:g} by RDP{way}."
    )


def _mechanism(phase, label):
    updates = "1 update" if phase.steps == 1 else f"{phase.steps} updates"
    sensitivity = ""
    if phase.neighboring_relation == "replace_one":
        sensitivity = " (half the sensitivity, since one clipped gradient replaces another)"
    return (
        f"Mechanism{label}: {updates}, each with Gaussian noise of {phase.noise_multiplier:g} "
        f"times the clipping norm{sensitivity} on the sum of the clipped per-{phase.unit} "
        "gradients."
    )


def _assumed_sampling(phase, label):
    n, word = phase.num_examples, phase.unit
    if phase.sampling == "poisson":
        cut = ""
        if phase.capacity is not None:
            cut = f", and draws of more than {phase.capacity} are cut to it at random"
        return (
            f"Sampling assumed{label}: Poisson, where every update draws each {word} independently "
            f"with probability {phase.batch_size}/{n} = {phase.sampling_probability:.4g}{cut}. For "
            "batches formed in another way, such as fixed batches of shuffled data, this epsilon "
            "does not hold."
        )
    if phase.sampling == "shuffle":
        begun = "1 epoch" if phase.passes == 1 else f"{phase.passes} epochs"
        spans = ""
        if phase.participations_per_update > 1:
            spans = f" (up to {phase.participations_per_update} times in the same one)"
        return (
            f"Sampling assumed{label}: fixed batches of {n} shuffled {word}s, each of which takes "
            f"part in one update of each of {begun}{spans}. No amplification by sampling is "
            "claimed."
        )
    if phase.sampling == "without_replacement":
        return (
            f"Sampling assumed{label}: every update draws exactly {phase.batch_size} of {n} "
            f"{word}s, each set of them with the same probability."
        )
    return f"Sampling assumed{label}: none, every update uses all {n} {word}s."


_POST_PROCESSING = (
    "The weights after every update are covered, whatever the optimizer makes of the noisy "
    "gradient: momentum, Adam or LAMB do not change epsilon."
)

_NOT_COVERED = (
    "the loss, metrics and gradient norms that training logs, which are computed from the data "
    "without noise",
    "the search for hyperparameters",
    "early stopping, or the choice of a checkpoint, by a figure computed on private data",
)
