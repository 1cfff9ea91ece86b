"""Membership inference: how well can one tell from a trained model who was in its training set?

Two attacks on a classifier, both from what it says about an example's label:

- a threshold on the loss (Yeom et al. 2018, arXiv 1709.01604);
- LiRA (Carlini et al. 2022, "Membership Inference Attacks From First Principles", arXiv
  2112.03570): shadow models, trained alike on known random subsets, show how confident a model
  is of this example when it has, or has not, seen it. The likelihood ratio of two normal
  distributions is the score; or, offline, how unlikely a model without it is.

What counts is not the average: an attack that is sure of a few people is a leak. So reports hold
the true positive rate at small false positive rates beside the area under the curve.

An attack shows what leaks at least. That a known attack fails proves nothing; epsilon does.
"""

import dataclasses

import numpy as np
from scipy import stats

from keras_dp.auditing.trade_off import upper_bound

FALSE_POSITIVE_RATES = (0.001, 0.01, 0.1)
# From this many shadow models with and without an example on, each example has a variance of its
# own (Carlini et al. 2022, section VI.C, finds the global variance better below about 64 models).
_OWN_VARIANCE_FROM = 32
_LEAST_STDDEV = 1e-6


@dataclasses.dataclass(frozen=True)
class AttackReport:
    """The receiver operating characteristic of an attack.

    Attributes:
      name: str, the attack.
      false_positive_rates, true_positive_rates: float arrays ``[thresholds]``, rising, from (0, 0)
        to (1, 1).
      members, non_members: int, how many were attacked.
    """

    name: str
    false_positive_rates: np.ndarray = dataclasses.field(repr=False)
    true_positive_rates: np.ndarray = dataclasses.field(repr=False)
    members: int
    non_members: int

    @property
    def auc(self):
        """float: area under the curve. 0.5 is guessing."""
        steps = np.diff(self.false_positive_rates)
        heights = (self.true_positive_rates[1:] + self.true_positive_rates[:-1]) / 2
        return float(np.sum(steps * heights))

    @property
    def advantage(self):
        """float: the largest difference of true and false positive rate."""
        return float(np.max(self.true_positive_rates - self.false_positive_rates))

    def tpr_at(self, false_positive_rate):
        """The largest true positive rate with at most this false positive rate.

        Args:
          false_positive_rate: float in [0, 1]. Rates below 1 / non_members cannot be measured:
            they stand for no false positive at all.

        Returns:
          float.
        """
        if not 0 <= false_positive_rate <= 1:
            raise ValueError(f"false_positive_rate is in [0, 1]; received {false_positive_rate}.")
        allowed = self.false_positive_rates <= false_positive_rate
        return float(np.max(self.true_positive_rates[allowed]))

    def tpr_interval(self, false_positive_rate, confidence=0.95):
        """Clopper and Pearson's interval of :meth:`tpr_at`, the threshold taken as given.

        Returns:
          ``(low, high)``.
        """
        count = round(self.tpr_at(false_positive_rate) * self.members)
        level = (1 - confidence) / 2
        low = 1 - float(upper_bound(self.members - count, self.members, level))
        return low, float(upper_bound(count, self.members, level))

    def to_dict(self):
        """What ``json.dumps`` takes: the numbers without the curve."""
        return {
            "attack": self.name,
            "members": self.members,
            "non_members": self.non_members,
            "auc": self.auc,
            "advantage": self.advantage,
            "tpr_at_fpr": {f"{rate:g}": self.tpr_at(rate) for rate in FALSE_POSITIVE_RATES},
        }

    def __str__(self):
        rates = ", ".join(f"{self.tpr_at(r):.3f} at {r:g}" for r in FALSE_POSITIVE_RATES)
        return f"{self.name}: AUC {self.auc:.3f}; true positive rate {rates} false positives"


def attack_report(name, scores, is_member):
    """The report of an attack from its scores.

    Args:
      name: str.
      scores: float array, any shape: larger for what seems to be a member. NaN counts as the
        smallest.
      is_member: bool array of that shape.

    Returns:
      AttackReport. Equal scores are told apart by no threshold: they are one point of the curve.

    Raises:
      ValueError: shapes that differ, or no member, or nothing but members.
    """
    scores, is_member = np.asarray(scores, np.float64), np.asarray(is_member)
    if scores.shape != is_member.shape or is_member.dtype != np.bool_:
        raise ValueError(
            "is_member must be a bool array of the shape of scores; received "
            f"{is_member.dtype} {is_member.shape} and {scores.shape}."
        )
    scores = np.where(np.isnan(scores), -np.inf, scores).ravel()
    is_member = is_member.ravel()
    members = int(np.sum(is_member))
    others = len(is_member) - members
    if members == 0 or others == 0:
        raise ValueError(
            f"An attack is judged on members and on others; received {members} and {others}. "
            "Hold out examples of the same kind as those trained on."
        )
    order = np.argsort(-scores, kind="stable")
    last_of_equals = np.append(np.flatnonzero(np.diff(scores[order])), len(order) - 1)
    true = np.cumsum(is_member[order])[last_of_equals] / members
    false = np.cumsum(~is_member[order])[last_of_equals] / others
    return AttackReport(name, np.append(0.0, false), np.append(0.0, true), members, others)


def label_confidences(outputs, labels, from_logits):
    """How sure a classifier is of each label: log(p / (1 - p)), as LiRA has it.

    Falls with the cross-entropy -log p, so that as a score it is the threshold attack on the loss,
    and is nearly normal over models (Carlini et al. 2022, arXiv 2112.03570, section IV.B).

    Args:
      outputs: float array ``[examples, classes]``, or ``[examples, 1]`` or ``[examples]`` for two
        classes, whose one number is for class 1.
      labels: int array ``[examples]``.
      from_logits: bool: logits, or probabilities.

    Returns:
      float array ``[examples]``, finite if the outputs are.

    Raises:
      ValueError: shapes that do not fit.
    """
    outputs, labels = np.asarray(outputs, np.float64), np.asarray(labels).reshape(-1)
    if not from_logits:
        tiny = np.finfo(np.float32).tiny
        binary = outputs.ndim == 1 or outputs.shape[-1] == 1
        less = np.log(np.maximum(1 - outputs, tiny)) if binary else 0.0
        outputs = np.log(np.maximum(outputs, tiny)) - less
    if outputs.ndim == 1 or (outputs.ndim == 2 and outputs.shape[1] == 1):
        ones = outputs.reshape(-1)
        outputs = np.stack([np.zeros_like(ones), ones], 1)
    if outputs.ndim != 2 or len(outputs) != len(labels) or labels.dtype.kind not in "iu":
        raise ValueError(
            "label_confidences takes outputs [examples, classes] and whole-number labels "
            f"[examples]; received {outputs.shape} and {labels.dtype} {labels.shape}."
        )
    if len(labels) and not 0 <= labels.min() <= labels.max() < outputs.shape[1]:
        raise ValueError(
            f"labels must be in [0, {outputs.shape[1]}); received {labels.min()} to {labels.max()}."
        )
    rows = np.arange(len(labels))
    own, others = outputs[rows, labels], outputs.copy()
    others[rows, labels] = -np.inf
    return own - np.logaddexp.reduce(others, axis=1)


def lira_scores(confidences, shadow_confidences, shadow_members, offline=False):
    """LiRA's score of every example for one attacked model.

    Args:
      confidences: float array ``[examples]`` of the attacked model; :func:`label_confidences`.
      shadow_confidences: float array ``[models, examples]`` of shadow models, trained alike.
      shadow_members: bool array ``[models, examples]``: whom each was trained on. Every example
        needs two models without it and, unless ``offline``, two with it.
      offline: bool. False: log N(c; in) - log N(c; out). True: the logarithm of
        P[N(out) < c], for shadow models that were trained before the examples were known.

    Returns:
      float array ``[examples]``, larger for what seems to be a member. Variances are those of all
      examples together where an example has fewer than 32 models of a kind.

    Raises:
      ValueError: shapes that do not fit, or too few models.
    """
    confidences = np.asarray(confidences, np.float64)
    shadows, inside = np.asarray(shadow_confidences, np.float64), np.asarray(shadow_members)
    if shadows.shape != inside.shape or shadows.shape[1:] != confidences.shape:
        raise ValueError(
            "lira_scores takes arrays [examples], [models, examples] and [models, examples]; "
            f"received {confidences.shape}, {shadows.shape} and {inside.shape}."
        )
    inside = inside.astype(bool)
    out = _normal(shadows, ~inside, "without")
    if offline:
        return stats.norm.logcdf(confidences, *out)
    within = _normal(shadows, inside, "with")
    return stats.norm.logpdf(confidences, *within) - stats.norm.logpdf(confidences, *out)


def cross_lira_scores(confidences, members, offline=False):
    """LiRA of each of several models with all others as its shadow models.

    Args:
      confidences: float array ``[models, examples]``.
      members: bool array ``[models, examples]``.
      offline: as of :func:`lira_scores`.

    Returns:
      float array ``[models, examples]``.
    """
    confidences, members = np.asarray(confidences), np.asarray(members)
    scores = []
    for k in range(len(confidences)):
        others = np.arange(len(confidences)) != k
        scores.append(lira_scores(confidences[k], confidences[others], members[others], offline))
    return np.stack(scores)


def _normal(confidences, chosen, word):
    """Mean and standard deviation over the chosen models, for each example."""
    counts = chosen.sum(0)
    if counts.min() < 2:
        raise ValueError(
            f"An example has only {counts.min()} shadow models {word} it; two are needed. Train "
            "more shadow models, each on a random half of the examples."
        )
    mean = np.where(chosen, confidences, 0).sum(0) / counts
    squares = np.where(chosen, (confidences - mean) ** 2, 0).sum(0)
    common = squares.sum() / (counts - 1).sum()
    variance = np.where(counts >= _OWN_VARIANCE_FROM, squares / (counts - 1), common)
    return mean, np.maximum(np.sqrt(variance), _LEAST_STDDEV)
