"""The errors of keras_dp. Each says what was received, what is allowed and what to do."""


class PrivacyError(Exception):
    """Going on would break, or misstate, the privacy guarantee."""


class UnclippedGradientsError(PrivacyError):
    """A DP optimizer was handed gradients that were not clipped per example."""


class IncompatibleModelError(PrivacyError):
    """The model, or its loss, cannot be trained privately as it stands."""


class BudgetExceededError(PrivacyError):
    """The next update would spend more privacy than was allowed."""


class LedgerError(PrivacyError):
    """A privacy ledger is damaged, cannot be read or written, or is of other data."""
