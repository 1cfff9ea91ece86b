"""Audits: what trained models show of their training data, measured.

A privacy audit trains with known canaries and gives a lower bound on epsilon, with a confidence:
:func:`audit_one_run` from one training, :func:`audit_many_runs` from many. A bound above the
claimed epsilon refutes the claim: something is broken. A bound below it proves nothing, but shows
how much of the claim an attack can reach.

Membership inference (:func:`attack_report`, :func:`lira_scores`) measures how well the people in a
training set can be told from others by what a trained classifier says.

Audits look at data without noise. What they print is not private: run them on data that stand in
for the private ones.
"""

from keras_dp.auditing.audits import (
    ManyRunsAudit,
    OneRunAudit,
    audit_many_runs,
    audit_one_run,
)
from keras_dp.auditing.guesses import (
    epsilon_of_guesses,
    epsilon_of_scores,
    guesses_of_scores,
    p_value_of_guesses,
)
from keras_dp.auditing.membership import (
    AttackReport,
    attack_report,
    cross_lira_scores,
    label_confidences,
    lira_scores,
)
from keras_dp.auditing.trade_off import Errors, epsilon_of_mu, epsilon_of_rates, mu_of_rates

__all__ = [
    "AttackReport",
    "Errors",
    "ManyRunsAudit",
    "OneRunAudit",
    "attack_report",
    "audit_many_runs",
    "audit_one_run",
    "cross_lira_scores",
    "epsilon_of_guesses",
    "epsilon_of_mu",
    "epsilon_of_rates",
    "epsilon_of_scores",
    "guesses_of_scores",
    "label_confidences",
    "lira_scores",
    "mu_of_rates",
    "p_value_of_guesses",
]
