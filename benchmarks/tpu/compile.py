"""Compiles one program for one TPU topology, in a process of its own; prints a line of JSON.

    python -m benchmarks.tpu.compile --model=cnn --optimizer=DPSGD --topology=v5e:2x4

Needs the environment of ``make bench-tpu-install``. libtpu ends the process when it meets a
program that it has no code for, so every program has a process.
"""

import json
import time
import traceback

import tensorflow as tf
from absl import app, flags

from benchmarks.tpu import aot, controls, hlo, program

FLAGS = flags.FLAGS


def measure(built, targets):
    """Lowers and compiles a program and looks at what came out.

    Args:
      built: :class:`~benchmarks.tpu.program.Program`.
      targets: the devices to compile for, one a replica.

    Returns:
      dict of what can be written as JSON; sizes in bytes, of one core.
    """
    start = time.perf_counter()
    lowered = aot.lower(built.step, *built.specs)
    lowered_at = time.perf_counter()
    executable = aot.compile_for(lowered, targets)
    compiled_at = time.perf_counter()
    given = hlo.instructions(aot.text(lowered))
    made = hlo.instructions("\n".join(m.to_string() for m in executable.hlo_modules()))
    sent, asked = hlo.collectives(made), hlo.collectives(given)
    memory = executable.get_compiled_memory_stats()
    costs = executable.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return {
        "parameters": built.parameters,
        "replicas": len(targets),
        "hosts": len({device.process_index for device in targets}),
        "device": targets[0].device_kind,
        "collectives": _counts(i.opcode.removesuffix("-start") for i in sent),
        "collectives_before": _counts(i.opcode for i in asked),
        "sent_bytes": sum(i.bytes for i in sent),
        "summed_elements": sum(i.elements for i in asked),
        "host_calls": hlo.host_calls(made) + hlo.host_calls(given),
        "custom_calls": hlo.custom_calls(made),
        "generators": hlo.generators(given),
        "generators_after": hlo.generators(made),
        "precisions": hlo.precisions(given),
        "arguments_bytes": memory.argument_size_in_bytes,
        "outputs_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
        "flops": costs.get("flops"),
        "bytes_accessed": costs.get("bytes accessed"),
        "transcendentals": costs.get("transcendentals"),
        "lower_s": lowered_at - start,
        "compile_s": compiled_at - lowered_at,
    }


def _counts(names):
    names = list(names)
    return {name: names.count(name) for name in sorted(set(names))}


def main(argv):
    """Compiles what the flags name."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    tf.config.experimental.enable_tensor_float_32_execution(FLAGS.tensor_float_32)
    targets = aot.devices(FLAGS.topology)[: FLAGS.replicas]
    if FLAGS.control:
        built = controls.CONTROLS[FLAGS.control](len(targets))
    else:
        built = program.build(
            FLAGS.model,
            FLAGS.optimizer,
            len(targets),
            private=FLAGS.private,
            batch_size=FLAGS.batch_size,
            policy=FLAGS.policy,
            noise=FLAGS.noise_multiplier,
        )
    try:
        record = measure(built, targets)
    except Exception as error:
        traceback.print_exc()
        record = {"refused": f"{type(error).__name__}: {error}"}
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    flags.DEFINE_enum("model", "cnn", list(program.ENTRIES), "model to train")
    flags.DEFINE_enum("optimizer", "DPSGD", list(program.PLAIN), "private optimizer")
    flags.DEFINE_bool("private", True, "train with it, or with the Keras optimizer beneath it")
    flags.DEFINE_string("topology", "v5e:2x4", "of libtpu, such as v5e:2x4")
    flags.DEFINE_integer("replicas", None, "devices that are used; none: all", 1)
    flags.DEFINE_integer("batch_size", None, "rows of a replica; none: the model's own", 1)
    flags.DEFINE_string("policy", "float32", "dtype policy of Keras")
    flags.DEFINE_bool("tensor_float_32", True, "TensorFlow's own switch; its default is True")
    flags.DEFINE_float("noise_multiplier", 1.0, "of the private step", 0)
    flags.DEFINE_enum("control", None, list(controls.CONTROLS), "a program to be refused")
    app.run(main)
