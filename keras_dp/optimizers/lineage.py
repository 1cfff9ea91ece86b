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
        self._past, self._released = _Past(), _Count()

    @property
    def run(self):
        """``tf.Variable`` that holds :attr:`run_id`."""
        return self._run

    @property
    def run_id(self):
        """str, 32 hex digits: the same for all optimizers restored from one another."""
        return self._run.numpy().tobytes().hex()

    @property
    def position(self):
        """tuple: the run id, and the updates of the run that led to the present weights."""
        return self.run_id, int(self.iterations.numpy())

    @property
    def released(self):
        """int, updates that this object has made in this process, whatever was restored."""
        return int(self._released.value.numpy())

    def _count_release(self):
        self._released.value.assign_add(1)

    @property
    def restores(self):
        """list of (before, after, released): positions around each restore, and the updates so far.

        In this process, from Keras files. What ``tf.train.Checkpoint`` restores is not listed; it
        shows in that ``iterations`` and :attr:`released` no longer grow by the same number.
        """
        return self._past.restores

    def save_own_variables(self, store):
        """The state of the Keras optimizer, and the run id."""
        super().save_own_variables(store)
        store[_KEY] = self._run.numpy()

    def load_own_variables(self, store):
        """Takes over state and run id; without a saved id, a run of its own goes on."""
        saved = {key: store[key] for key in store.keys()}
        run, before = saved.pop(_KEY, None), self.position
        super().load_own_variables(saved)
        if len(saved) == len(self.variables):
            if run is not None:
                self._run.assign(np.asarray(run))
            self._past.restores.append((before, self.position, self.released))


class _Past:
    """Keeps a list out of sight of TensorFlow, which would track, and save, it."""

    def __init__(self):
        self.restores = []


class _Count:
    """A counter that no checkpoint sets back; a copy counts anew."""

    def __init__(self):
        with tf.init_scope():
            self.value = tf.Variable(0, dtype=tf.int64, trainable=False, name="released")

    def __deepcopy__(self, memo):
        return _Count()

    def __reduce__(self):
        return _Count, ()
