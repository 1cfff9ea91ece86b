"""The two audits: one training with many canaries, and many trainings with one."""

import dataclasses
import os

import keras
import numpy as np

from keras_dp.accounting import Phase
from keras_dp.accounting.checks import checked_int
from keras_dp.auditing import guesses
from keras_dp.auditing.runs import Trainings
from keras_dp.auditing.trade_off import LEAST_RUNS, Errors, epsilon_of_mu


@dataclasses.dataclass(frozen=True)
class OneRunAudit:
    """What one training says about its epsilon.

    Attributes:
      phase: the :class:`~keras_dp.accounting.Phase` that was audited.
      delta: float, of the claim and of the bounds.
      claimed_epsilon: float.
      scores: float array ``[canaries]``, larger where a canary seems to be in.
      included: bool array ``[canaries]``, the truth.
      num_guesses: tuple of ints, see :func:`keras_dp.auditing.epsilon_of_scores`.
    """

    phase: Phase
    delta: float
    claimed_epsilon: float
    scores: np.ndarray = dataclasses.field(repr=False)
    included: np.ndarray = dataclasses.field(repr=False)
    num_guesses: tuple

    def epsilon(self, confidence=0.95):
        """The lower bound on epsilon.

        Args:
          confidence: float in (0, 1), with which the training is not (e, delta)-private for any
            e below the bound.

        Returns:
          float >= 0.
        """
        return guesses.epsilon_of_scores(
            self.scores,
            self.included,
            delta=self.delta,
            confidence=confidence,
            num_guesses=self.num_guesses,
        )

    def gaussian_epsilon(self, confidence=0.95):
        """An estimate of epsilon that is far closer, and no bound.

        It takes the canaries for as many trainings with and without: their scores for independent,
        as those of worst-case canaries are, and the mechanism for mu-GDP, as Gaussian noise on
        everything is and sampled batches are nearly (the idea of Andrew et al. 2023, arXiv
        2302.03098, who fit normal distributions to canaries of one training).

        Args:
          confidence: float in (0, 1).

        Returns:
          float >= 0; 0 where fewer than 8 canaries are in, or out.
        """
        number = int(np.sum(self.included))
        if min(number, len(self.included) - number) < LEAST_RUNS:
            return 0.0
        errors = Errors(self.scores[self.included], self.scores[~self.included])
        return epsilon_of_mu(errors.mu(confidence), self.delta)

    def refutes_claim(self, confidence=0.95):
        """Whether the bound is above the claimed epsilon: bool."""
        return self.epsilon(confidence) > self.claimed_epsilon

    def __str__(self):
        return _sentence(self, f"one training with {len(self.scores)} canaries", self.epsilon())


@dataclasses.dataclass(frozen=True)
class ManyRunsAudit:
    """What many trainings, with and without one canary, say about epsilon.

    Attributes:
      phase, delta, claimed_epsilon: as of :class:`OneRunAudit`.
      scores_with, scores_without: float arrays ``[runs]``.
    """

    phase: Phase
    delta: float
    claimed_epsilon: float
    scores_with: np.ndarray = dataclasses.field(repr=False)
    scores_without: np.ndarray = dataclasses.field(repr=False)

    @property
    def is_gaussian(self):
        """bool: every update uses all examples, so that training is mu-GDP exactly."""
        return self.phase.sampling == "full_batch"

    def epsilon(self, confidence=0.95):
        """The lower bound on epsilon, whatever the mechanism; at most about log(runs / 5).

        Args:
          confidence: float in (0, 1).

        Returns:
          float >= 0.
        """
        return self._errors.epsilon(self.delta, confidence)

    def gaussian_epsilon(self, confidence=0.95):
        """The lower bound on epsilon of a mechanism that is mu-GDP; far closer.

        Where batches are samples of the data it is an estimate; see ``is_gaussian``.

        Args:
          confidence: float in (0, 1).

        Returns:
          float >= 0.
        """
        return epsilon_of_mu(self.mu(confidence), self.delta)

    def mu(self, confidence=0.95):
        """The lower bound on mu; see :meth:`keras_dp.auditing.Errors.mu`."""
        return self._errors.mu(confidence)

    def refutes_claim(self, confidence=0.95):
        """Whether a bound is above the claimed epsilon: bool.

        The bound is :meth:`gaussian_epsilon` where it is one, else :meth:`epsilon`.
        """
        best = self.gaussian_epsilon if self.is_gaussian else self.epsilon
        return best(confidence) > self.claimed_epsilon

    def __str__(self):
        what = f"{len(self.scores_with)} trainings with and {len(self.scores_without)} without"
        bound = self.gaussian_epsilon() if self.is_gaussian else self.epsilon()
        return _sentence(self, f"{what} a canary", bound)

    @property
    def _errors(self):
        return Errors(self.scores_with, self.scores_without)


def audit_one_run(
    model,
    x,
    y,
    *,
    steps,
    delta,
    canaries=1000,
    adversary="white_box",
    num_guesses=None,
    accountant="pld",
):
    """Audits one training: a lower bound on its epsilon, from many canaries.

    Every canary is put in or left out by a coin of its own, the model is trained once through
    ``keras_dp.PoissonSampler`` and ``fit``, and the bound is that of Steinke et al. 2023 (arXiv
    2305.08846). The canaries are part of the data: the claim is for all N = examples + canaries.

    Args:
      model: a compiled model with a DP optimizer. Its weights are left as they were.
      x, y: arrays, or structures of arrays: the data around the canaries.
      steps: int >= 1, updates.
      delta: float in (0, 1), below 1 / canaries by far: the bound loses about delta * canaries.
      canaries: int, the number of worst-case canaries, whose gradients are as long as the clip
        allows and orthogonal to all others (for functional and sequential models; they see the
        model's loss, not its loss weights). Or a pair (x, y) of examples of your own, such as
        mislabelled ones.
      adversary: "white_box" sees every update, "black_box" the losses of the trained model. Of
        worst-case canaries the two say the same under DPSGD; what other optimizers make of the
        noisy gradients can tell less.
      num_guesses: int or ints; see :func:`keras_dp.auditing.epsilon_of_scores`.
      accountant: "pld" or "rdp", by which the claim is computed.

    Returns:
      OneRunAudit.

    Raises:
      ValueError: not such arguments, or a model that cannot be audited so.
    """
    trainings = Trainings(
        model,
        x,
        y,
        canaries=canaries,
        adversary=adversary,
        steps=steps,
        delta=delta,
        accountant=accountant,
    )
    if num_guesses is None:
        num_guesses = guesses.usual_numbers_of_guesses(trainings.number)
    included = _random().integers(0, 2, trainings.number).astype(bool)
    scores = trainings.run(included)[0]
    return OneRunAudit(
        trainings.phase,
        delta,
        trainings.claimed_epsilon,
        scores,
        included,
        tuple(np.atleast_1d(num_guesses).tolist()),
    )


def audit_many_runs(
    model,
    x,
    y,
    *,
    runs,
    steps,
    delta,
    canary=None,
    adversary="white_box",
    accountant="pld",
    verbose=0,
):
    """Audits by many trainings with one canary and as many without it.

    Args:
      runs: int >= 8, trainings of each kind.
      canary: None for the worst case, or a pair (x, y) of arrays with one example.
      verbose: 1 shows a progress bar.
      Others as of :func:`audit_one_run`.

    Returns:
      ManyRunsAudit.

    Raises:
      ValueError: not such arguments, or a model that cannot be audited so.
    """
    runs = checked_int("runs", runs, LEAST_RUNS, "Some hundred tell something.")
    trainings = Trainings(
        model,
        x,
        y,
        canaries=1 if canary is None else canary,
        adversary=adversary,
        steps=steps,
        delta=delta,
        accountant=accountant,
    )
    if trainings.number != 1:
        raise ValueError(
            f"canary must be one example, a pair of arrays of length 1; received "
            f"{trainings.number}. audit_one_run takes many."
        )
    bar = keras.utils.Progbar(2 * runs, verbose=verbose, unit_name="training")
    scores = []
    for number, included in enumerate((True, False)):

        def show(done, before=number * runs):
            bar.update(before + done)

        found = trainings.run(np.array([included]), runs, show if verbose else None)
        scores.append(found[:, 0])
    return ManyRunsAudit(trainings.phase, delta, trainings.claimed_epsilon, *scores)


def _random():
    return np.random.default_rng(int.from_bytes(os.urandom(16), "little"))


def _sentence(audit, what, bound):
    verdict = "REFUTES" if audit.refutes_claim() else "does not refute"
    return (
        f"Audit by {what}: epsilon is at least {bound:.3g} with confidence 95 %, which {verdict} "
        f"the claimed {audit.claimed_epsilon:.3g}, at delta = {audit.delta:g} "
        f"({audit.phase.steps} updates, sampling: {audit.phase.sampling})."
    )
