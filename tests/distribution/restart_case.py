"""A training of several workers of which one dies, or which goes on from the chief's backup.

    python -m tests.distribution.restart_case FOLDER VICTIM

FOLDER is one for each start; beside it lie the backup and the disks of the workers. VICTIM is the
number of the worker that dies after its tenth update, or "nobody".
"""

import os
import signal
import sys

import keras

import keras_dp
from tests.distribution.witness import LOSSES, examples, witnessed
from tests.distribution.worker import digest, folder, number, report, strategy, weights_of

DISKS = folder.parent


class Dies(keras.callbacks.Callback):
    """Ends the process as a power cut would."""

    def on_train_batch_end(self, batch, logs=None):
        """Not before ten updates."""
        if sys.argv[2] == str(number) and int(self.model.optimizer.iterations.numpy()) == 10:
            os.kill(os.getpid(), signal.SIGKILL)


sampler = keras_dp.PoissonSampler(*examples(40), batch_size=10)
with strategy.scope():
    model = witnessed(40)
    optimizer = keras_dp.DPAdam(0.05, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=10)
    model.compile(optimizer, LOSSES)
logger = keras_dp.callbacks.EpsilonLogger(sampler, delta=1e-5, ledger=DISKS / f"disk{number}")
callbacks = [logger, Dies()]
if keras_dp.distribution.is_chief(strategy):
    callbacks.append(keras.callbacks.BackupAndRestore(DISKS / "backup", delete_checkpoint=False))
findings = {"secret": digest(optimizer._noise._secret.numpy()), "error": None}
try:
    model.fit(sampler, epochs=5, verbose=0, callbacks=callbacks)
except Exception as error:
    findings["error"] = type(error).__name__, str(error)
    raise
finally:
    report(
        findings
        | {
            "updates": int(optimizer.iterations.numpy()),
            "run": optimizer.run_id,
            "epsilon": logger.epsilon,
            "steps": logger.steps,
            "state": digest(*weights_of(model)),
        }
    )
