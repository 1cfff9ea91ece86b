"""What a training run costs in privacy, and the settings that a budget asks for.

A run is a list of phases (:class:`Phase`), updates of one kind. Each phase is a number of releases
that an example can take part in, told as events of dp-accounting. The accountants compose them:
Renyi DP (`keras_dp.renyi`) or privacy loss distributions (`keras_dp.accounting.pld`). A figure by a
central limit theorem ("GDP") is no bound and is offered nowhere.

An epoch is ``steps_per_epoch(num_examples, batch_size)`` updates, everywhere.
"""

from keras_dp.accounting.calibration import compute_epsilon, compute_noise_multiplier
from keras_dp.accounting.composition import ACCOUNTANTS, epsilon_of_phases
from keras_dp.accounting.curve import EpsilonCurve
from keras_dp.accounting.phases import (
    NEIGHBORING_RELATIONS,
    SAMPLINGS,
    Phase,
    common_relation,
    steps_per_epoch,
)
from keras_dp.accounting.statement import privacy_statement, statement

__all__ = [
    "ACCOUNTANTS",
    "NEIGHBORING_RELATIONS",
    "SAMPLINGS",
    "EpsilonCurve",
    "Phase",
    "common_relation",
    "compute_epsilon",
    "compute_noise_multiplier",
    "epsilon_of_phases",
    "privacy_statement",
    "statement",
    "steps_per_epoch",
]
