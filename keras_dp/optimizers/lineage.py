"""Which run an optimizer's updates belong to: an id that its checkpoints carry.

``iterations`` says how many updates led to the weights, not whether a ledger has counted them
already: they may be another run's, on the same data. So every DP optimizer draws a random id,
saves it beside its variables and takes over the saved one when it is restored. The id is no
secret and says nothing about data or noise.
"""

import os

import numpy as np
import tensorflow as tf

_KEY = "keras_dp_run"


class Lineage:
    """The run id of a DP optimizer; mixed in before a Keras optimizer class."""

    def _begin_run(self):
        # An attribute, so that tf.train.Checkpoint finds it; no optimizer variable, so that the
        # state of the Keras optimizer keeps its layout.
        with tf.init_scope():
            self._run = tf.Variable(
                np.frombuffer(os.urandom(16), np.int64), trainable=False, name=_KEY
            )

    @property
    def run_id(self):
        """str, 32 hex digits: the same for all optimizers restored from one another."""
        return self._run.numpy().tobytes().hex()

    def save_own_variables(self, store):
        """The state of the Keras optimizer, and the run id."""
        super().save_own_variables(store)
        store[_KEY] = self._run.numpy()

    def load_own_variables(self, store):
        """Takes over state and run id; without a saved id, a run of its own goes on."""
        saved = {key: store[key] for key in store.keys()}
        run = saved.pop(_KEY, None)
        super().load_own_variables(saved)
        if run is not None and len(saved) == len(self.variables):
            self._run.assign(np.asarray(run))
