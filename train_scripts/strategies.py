"""On which devices a program trains: the flags for it, and the strategy they ask for."""

import json
import os

import tensorflow as tf
from absl import flags

from keras_dp import distribution
from keras_dp.distribution.strategies import NAMES


def define_flags(values=flags.FLAGS):
    """Adds --strategy, --num_replicas, --worker_hosts and --task_index.

    Args:
      values: ``absl.flags.FlagValues``.
    """
    flags.DEFINE_enum(
        "strategy",
        "default",
        NAMES,
        "default: one device. mirrored: the GPUs of this machine, or logical CPUs where there is "
        "none. multi_worker: several machines, by --worker_hosts or TF_CONFIG. tpu.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "num_replicas",
        None,
        "Devices that train together; by default all. Batch sizes are those of all together.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_list(
        "worker_hosts",
        None,
        "host:port of each worker, the chief first, the same list on all. Sets TF_CONFIG.",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "task_index",
        None,
        "Which of --worker_hosts this process is.",
        lower_bound=0,
        flag_values=values,
    )


def from_flags(values=flags.FLAGS):
    """The strategy that the flags ask for. Comes first of all that uses TensorFlow.

    Args:
      values: ``absl.flags.FlagValues`` with the flags of :func:`define_flags`, parsed.

    Returns:
      ``tf.distribute.Strategy``.

    Raises:
      ValueError: flags that do not fit together, or to this machine.
    """
    name, replicas = values.strategy, values.num_replicas
    if name != "multi_worker" and (values.worker_hosts or values.task_index is not None):
        raise ValueError(
            f"--worker_hosts and --task_index are for --strategy=multi_worker, not {name}."
        )
    if name == "multi_worker":
        _set_cluster(values.worker_hosts, values.task_index)
    elif name == "mirrored" and replicas and not tf.config.list_physical_devices("GPU"):
        _make_logical_cpus(replicas)
    strategy = distribution.get_strategy(name, devices=replicas if name == "mirrored" else None)
    if replicas not in (None, strategy.num_replicas_in_sync):
        raise ValueError(
            f"--num_replicas={replicas}, but --strategy={name} has "
            f"{strategy.num_replicas_in_sync} here. Leave it out, or choose another strategy."
        )
    return strategy


def _set_cluster(hosts, index):
    if hosts is None and index is None:
        return
    if os.environ.get("TF_CONFIG"):
        raise ValueError(
            "The environment variable TF_CONFIG describes the workers already: leave "
            "--worker_hosts and --task_index out, or unset it."
        )
    if hosts is None or index is None:
        raise ValueError("--worker_hosts and --task_index go together.")
    task = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": hosts}, "task": task})


def _make_logical_cpus(number):
    cpu = tf.config.list_physical_devices("CPU")[0]
    if tf.config.get_logical_device_configuration(cpu) is None:
        logical = [tf.config.LogicalDeviceConfiguration()] * number
        tf.config.set_logical_device_configuration(cpu, logical)
