"""Compiles a TensorFlow function for a TPU topology, by libtpu, on a machine without a TPU.

TensorFlow lowers the function to HLO as it would for XLA on a CPU: its kernels for TPUs are not
in a build for CPUs. From there on everything is the TPU compiler's. The names of jaxlib used
here are private; benchmarks/tpu/requirements.txt pins the version that has them.
"""

import os

# Before libtpu is loaded: it must not look for a machine with TPUs, nor talk about its absence.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("TPU_MIN_LOG_LEVEL", "3")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from jax._src.interpreters import mlir as contexts
from jax._src.lib.mlir import ir
from jax.experimental import topologies
from jaxlib import _jax, xla_client


def devices(topology):
    """The devices of a topology such as "v5e:2x4", which need not exist."""
    return topologies.get_topology_desc(topology_name=topology, platform="tpu").devices


def lower(function, *args):
    """What TensorFlow hands to XLA.

    Args:
      function: a ``tf.function(jit_compile=True)``.
      args: its arguments.

    Returns:
      bytes, a serialized HLO module. Its parameters are the arguments and then what the function
      captures; its results those of the function and then the new values of variables.
    """
    ir_of = function.experimental_get_compiler_ir(*args)
    return ir_of(stage="hlo_serialized", platform_name="CPU")


def text(serialized):
    """A serialized HLO module as text."""
    return xla_client.XlaComputation(serialized).as_hlo_module().to_string()


def compile_for(serialized, targets):
    """Compiles a module, one replica a device.

    Args:
      serialized: of :func:`lower`.
      targets: devices of one topology.

    Returns:
      jaxlib's executable, which cannot be run.

    Raises:
      jax.errors.JaxRuntimeError: what the TPU compiler refuses.
    """
    with contexts.make_ir_context():
        module = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(serialized))
        _drop_copies(module)
        places = np.array(targets).reshape(len(targets), 1)
        options = xla_client.CompileOptions()
        build = options.executable_build_options
        for holder in (options, build):
            holder.num_replicas, holder.num_partitions = len(targets), 1
        build.use_spmd_partitioning = build.use_shardy_partitioner = False
        numbers = np.vectorize(lambda device: device.id)(places)
        build.device_assignment = xla_client.DeviceAssignment.create(numbers)
        return targets[0].client.compile(
            module,
            executable_devices=xla_client.DeviceList(tuple(places.flatten())),
            compile_options=options,
        )


def _drop_copies(module):
    """TensorFlow copies new values of variables, by an operation that StableHLO does not have."""
    copies = []

    def visit(operation):
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for copy in copies:
        copy.results[0].replace_all_uses_with(copy.operands[0])
        copy.erase()
