"""What the programs of several workers have in common: the strategy, and what they find."""

import hashlib
import os
import pathlib
import pickle
import sys

import numpy as np
import tensorflow as tf

import keras_dp
from keras_dp.distribution import cluster

_cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    _cpu, [tf.config.LogicalDeviceConfiguration()] * int(os.environ.get("CPUS_OF_WORKER", "1"))
)
strategy = keras_dp.distribution.get_strategy("multi_worker")
number = cluster.worker_number(strategy)
folder = pathlib.Path(sys.argv[1])


def report(findings):
    """Hands the findings of this worker to the test."""
    (folder / f"{number}.pickle").write_bytes(pickle.dumps(findings))


def weights_of(model):
    """The weights as arrays."""
    return [v.numpy() for v in model.trainable_variables]


def digest(*arrays):
    """A hash of the bits of arrays."""
    return hashlib.blake2b(b"".join(np.asarray(a).tobytes() for a in arrays)).hexdigest()


def error_of(function):
    """Type and text of the error that ``function`` raises; None if it raises none."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return None
