"""Differentially private training for any Keras model.

model.compile(optimizer=keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.1,
                                       batch_size=256), loss=...)
model.fit(keras_dp.PoissonSampler(x, y, batch_size=256), ...)
"""

from keras_dp import _requirements

_requirements.check()

from keras_dp import (  # noqa: E402
    auditing,
    callbacks,
    distribution,
    entry_points,
    rules,
    testing,
    training,
)
from keras_dp.accounting import (  # noqa: E402
    compute_batch_size,
    compute_delta,
    compute_epochs,
    compute_epsilon,
    compute_noise_multiplier,
    compute_steps,
    privacy_report,
    privacy_statement,
    steps_per_epoch,
)
from keras_dp.accounting.ledger import PrivacyLedger  # noqa: E402
from keras_dp.clipping.clipped import ClippedGradients  # noqa: E402
from keras_dp.clipping.gradients import clipped_gradients  # noqa: E402
from keras_dp.clipping.rules import register_rule  # noqa: E402
from keras_dp.errors import (  # noqa: E402
    BudgetExceededError,
    IncompatibleModelError,
    LedgerError,
    PrivacyError,
    UnclippedGradientsError,
)
from keras_dp.optimizers import (  # noqa: E402
    DPSGD,
    DPAdam,
    DPAdamW,
    DPLamb,
    DPMomentum,
    make_private,
)
from keras_dp.repair import fix  # noqa: E402
from keras_dp.sampling import (  # noqa: E402
    ArrayRecordSource,
    FixedBatches,
    Padded,
    PoissonSampler,
    write_array_record,
)
from keras_dp.validation import Problem, validate  # noqa: E402
from keras_dp.version import __version__  # noqa: E402

training.install()
distribution.install()
entry_points.install()

__all__ = [
    "ArrayRecordSource",
    "BudgetExceededError",
    "ClippedGradients",
    "DPAdam",
    "DPAdamW",
    "DPLamb",
    "DPMomentum",
    "DPSGD",
    "FixedBatches",
    "IncompatibleModelError",
    "LedgerError",
    "Padded",
    "PoissonSampler",
    "PrivacyError",
    "PrivacyLedger",
    "Problem",
    "UnclippedGradientsError",
    "__version__",
    "auditing",
    "callbacks",
    "clipped_gradients",
    "compute_batch_size",
    "compute_delta",
    "compute_epochs",
    "compute_epsilon",
    "compute_noise_multiplier",
    "compute_steps",
    "distribution",
    "fix",
    "make_private",
    "privacy_report",
    "privacy_statement",
    "register_rule",
    "rules",
    "steps_per_epoch",
    "testing",
    "validate",
    "write_array_record",
]
