"""What a training run costs in privacy, and the settings that a budget asks for.

A run is a list of phases (:class:`Phase`), updates of one kind. Each phase is a number of releases
that an example can take part in, told as events of dp-accounting. The accountants compose them:
Renyi DP (`keras_dp.renyi`) or privacy loss distributions (`keras_dp.accounting.pld`). A figure by a
central limit theorem ("GDP") is no bound and is offered nowhere.

An epoch is ``steps_per_epoch(num_examples, batch_size)`` updates, everywhere.
"""

from keras_dp.accounting.advice import warn_about_settings
from keras_dp.accounting.calibration import (
    compute_batch_size,
    compute_delta,
    compute_epochs,
    compute_epsilon,
    compute_noise_multiplier,
    compute_steps,
    most_steps,
)
from keras_dp.accounting.composition import ACCOUNTANTS, epsilon_of_phases
from keras_dp.accounting.groups import epsilon_of_group
from keras_dp.accounting.phases import (
    NEIGHBORING_RELATIONS,
    SAMPLINGS,
    Phase,
    common_relation,
    steps_per_epoch,
)
from keras_dp.accounting.statement import (
    privacy_report,
    privacy_statement,
    report_of_phases,
    statement_of_phases,
)

__all__ = [
    "ACCOUNTANTS",
    "NEIGHBORING_RELATIONS",
    "SAMPLINGS",
    "Phase",
    "common_relation",
    "compute_batch_size",
    "compute_delta",
    "compute_epochs",
    "compute_epsilon",
    "compute_noise_multiplier",
    "compute_steps",
    "epsilon_of_group",
    "epsilon_of_phases",
    "most_steps",
    "privacy_report",
    "privacy_statement",
    "report_of_phases",
    "statement_of_phases",
    "steps_per_epoch",
    "warn_about_settings",
]
