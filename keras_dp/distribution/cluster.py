"""The processes that train together under one strategy, and what one says to all others.

One of them, the chief, keeps what there must be only one of: the ledger, the printed statement,
the state from which all begin. What it says travels as an all-reduce in which the others hold
zeros. So all have to listen at the same moment of the program, and they all do what the chief
says at the same update.
"""

import functools
import json

import numpy as np
import tensorflow as tf

from keras_dp.errors import PrivacyError


def workers_of(strategy):
    """int, the processes that train together under ``strategy``; 1 for None."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return 1
    resolver = strategy.cluster_resolver
    if resolver is None:
        return 1
    cluster = resolver.cluster_spec()
    return sum(len(cluster.job_tasks(job)) for job in ("chief", "worker") if job in cluster.jobs)


def worker_number(strategy):
    """int, of this process among :func:`workers_of`; 0 for the chief."""
    if workers_of(strategy) == 1:
        return 0
    resolver = strategy.cluster_resolver
    if "chief" not in resolver.cluster_spec().jobs:
        return resolver.task_id
    return 0 if resolver.task_type == "chief" else 1 + resolver.task_id


def is_chief(strategy=None):
    """Whether this process is the one of several that prints, and writes files, for all.

        if keras_dp.distribution.is_chief(strategy):
            callbacks.append(keras.callbacks.BackupAndRestore("backup"))

    Args:
      strategy: ``tf.distribute.Strategy``, or None: the one whose scope is open, if any.

    Returns:
      bool: True where there is one process only.
    """
    return worker_number(strategy or tf.distribute.get_strategy()) == 0


def from_chief(strategy, make):
    """What ``make`` gives on the chief, on all workers; only the chief calls it.

    Args:
      strategy: ``tf.distribute.Strategy``, or None.
      make: function without arguments that gives what JSON can hold.

    Raises:
      PrivacyError: on the other workers, if ``make`` raised; the chief raises the same as it.
    """
    if workers_of(strategy) == 1:
        return make()
    if worker_number(strategy):
        reply = json.loads(bytes_from_chief(strategy, b""))
        if "error" in reply:
            raise PrivacyError(f"The chief of the workers cannot go on: {reply['error']}")
        return reply["value"]
    try:
        value = make()
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}"}
        bytes_from_chief(strategy, json.dumps(reply).encode())
        raise
    bytes_from_chief(strategy, json.dumps({"value": value}).encode())
    return value


def bytes_from_chief(strategy, data):
    """The chief's ``data``, bytes, on all workers; what the others pass does not matter."""
    if worker_number(strategy):
        data = b""
    length = int(total(strategy, [len(data)])[0])
    if not length:
        return b""
    # Whole numbers add up without rounding, whatever the bytes stand for.
    words = np.zeros(-(-length // 8), np.int64)
    words.view(np.uint8)[: len(data)] = np.frombuffer(data, np.uint8)
    return total(strategy, words).tobytes()[:length]


def total(strategy, numbers):
    """The sum over all workers of int64 ``numbers``, of one length > 0 everywhere."""
    sums = _addition(strategy)(tf.constant(numbers, tf.int64))
    return strategy.experimental_local_results(sums)[0].numpy()


@functools.cache
def _addition(strategy):
    per_worker = strategy.num_replicas_in_sync // workers_of(strategy)

    def add(numbers):
        # Several replicas of one worker hold the same: one of them speaks.
        context = tf.distribute.get_replica_context()
        speaks = tf.convert_to_tensor(context.replica_id_in_sync_group) % per_worker == 0
        mine = tf.where(speaks, numbers, tf.zeros_like(numbers))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, mine)

    return tf.function(
        lambda numbers: strategy.run(add, args=(numbers,)),
        input_signature=[tf.TensorSpec([None], tf.int64)],
    )
