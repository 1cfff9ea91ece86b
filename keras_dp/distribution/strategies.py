"""``get_strategy``: a strategy of ``tf.distribute`` by name."""

import functools
import json
import os
import re

import tensorflow as tf

from keras_dp import precision

NAMES = ("default", "mirrored", "multi_worker", "tpu")


def get_strategy(name="default", devices=None, tpu=None):
    """A ``tf.distribute`` strategy that DP optimizers know.

    The update is the same under each of them: every replica clips the examples of its share of
    the batch, the clipped sums are added up over the replicas, once, and noise is added once.
    Model and optimizer are made in the strategy's scope:

        strategy = keras_dp.distribution.get_strategy("mirrored")
        with strategy.scope():
            model = ...
            model.compile(optimizer=keras_dp.DPSGD(...), loss=...)

    ``batch_size`` of the optimizer and of the data count the examples of one update over all
    replicas.

    Args:
      name: "default": one device, no strategy. "mirrored": the devices of this machine, each with
        a copy of the weights. "multi_worker": several machines, described by the environment
        variable TF_CONFIG, in each of which this program runs; call it before anything else
        that uses TensorFlow. "tpu": the cores of a TPU.
      devices: for "mirrored", None for all GPUs, or all (logical) CPUs where there is no GPU; an
        int, how many of these; or a list of device names such as "GPU:0".
      tpu: for "tpu", the name or address of the TPU; "" or None for what the environment names,
        "local" for the TPU of this machine.

    Returns:
      A ``tf.distribute.Strategy``.

    Raises:
      ValueError: for another name, or arguments that do not fit it.
    """
    if name not in NAMES:
        raise ValueError(
            f"strategy must be one of {', '.join(map(repr, NAMES))}. Received: {name!r}"
        )
    if devices is not None and name != "mirrored":
        raise ValueError(
            f"devices is for the strategy 'mirrored'; {name!r} finds its own. "
            f"Received: devices={devices!r}"
        )
    if tpu is not None and name != "tpu":
        raise ValueError(f"tpu is for the strategy 'tpu', not {name!r}. Received: tpu={tpu!r}")
    return _MAKE[name](devices, tpu)


def _default(devices, tpu):
    return tf.distribute.get_strategy()


def _mirrored(devices, tpu):
    if devices is None or isinstance(devices, int):
        devices = _of_this_machine(devices)
    return _mirrored_over(tuple(devices))


# One for the same devices: two in a process would take each other's all-reduces for their own.
@functools.cache
def _mirrored_over(devices):
    on_cpus = all("CPU" in device.upper() for device in devices)
    # What TensorFlow takes for CPUs by itself fails as soon as a process has two strategies.
    reduction = tf.distribute.ReductionToOneDevice() if on_cpus else None
    return tf.distribute.MirroredStrategy(list(devices), cross_device_ops=reduction)


def _of_this_machine(number):
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    there = [f"{kind}:{k}" for k in range(len(tf.config.list_logical_devices(kind)))]
    if number is not None and (isinstance(number, bool) or not 1 <= number <= len(there)):
        hint = (
            " Logical CPUs are made by tf.config.set_logical_device_configuration before "
            "TensorFlow is used."
            if kind == "CPU"
            else ""
        )
        raise ValueError(
            f"devices must be from 1 to {len(there)}, the {kind}s that TensorFlow sees. "
            f"Received: {number!r}.{hint}"
        )
    return there[:number]


def _multi_worker(devices, tpu):
    config = os.environ.get("TF_CONFIG", "")
    fault = _fault_of(config)
    if fault:
        raise ValueError(
            "The strategy 'multi_worker' needs the environment variable TF_CONFIG, such as "
            '{"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]}, '
            '"task": {"type": "worker", "index": 0}}, with the index of this machine: '
            f"{fault}. Received: {config!r}"
        )
    try:
        return tf.distribute.MultiWorkerMirroredStrategy()
    except RuntimeError as reason:
        raise RuntimeError(
            "The strategy 'multi_worker' has to be made before anything else uses TensorFlow. Call "
            "keras_dp.distribution.get_strategy('multi_worker') once, at the start of the program. "
            f"TensorFlow says: {reason}"
        ) from reason


def _fault_of(config):
    """What is wrong with a TF_CONFIG, or None."""
    try:
        parsed = json.loads(config)
    except ValueError:
        return "it is no JSON" if config else "it is not set"
    if not isinstance(parsed, dict):
        return "it is no object with 'cluster' and 'task'"
    jobs, task = parsed.get("cluster"), parsed.get("task")
    if not isinstance(jobs, dict) or not jobs:
        return "'cluster' is missing"
    if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
        return "'task' with 'type' and 'index' is missing"
    if unknown := jobs.keys() - {"chief", "worker"}:
        return f"the job {min(unknown)!r} takes no part in this strategy; leave it out"
    addresses = []
    for job, hosts in jobs.items():
        if not isinstance(hosts, list) or not hosts or not all(map(_is_address, hosts)):
            return f"'{job}' is no list of addresses with ports"
        addresses += hosts
    if len(set(addresses)) < len(addresses):
        return "an address is there twice"
    if len(jobs.get("chief", ())) > 1:
        return "there is more than one chief"
    hosts, index = jobs.get(task["type"]), task["index"]
    if hosts is None:
        return f"'type' is none of {', '.join(map(repr, jobs))}"
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(hosts):
        return f"'index' is not from 0 to {len(hosts) - 1}"
    return None


def _is_address(text):
    return isinstance(text, str) and re.fullmatch(r"\S+:\d+", text) is not None


def _tpu(devices, tpu):
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu=tpu or "")
        if tpu != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
    except (ValueError, OSError, tf.errors.OpError) as reason:
        raise ValueError(
            f"No TPU was found by the name {tpu!r}. Give the name or the grpc:// address of the "
            "TPU, or 'local' on a machine that has one, with TensorFlow's build for TPUs "
            f"installed. TensorFlow says: {reason}"
        ) from reason
    precision.ensure_float32_products()
    return tf.distribute.TPUStrategy(resolver)


_MAKE = {"default": _default, "mirrored": _mirrored, "multi_worker": _multi_worker, "tpu": _tpu}
