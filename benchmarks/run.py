"""Compares private training with plain Keras on the zoo: step time, first step, memory.

    python -m benchmarks.run --models=mlp,cnn --repeats=3 --output_dir=output/bench

Every measurement is a process of its own (``benchmarks.measure``). Plain and private ones
take turns, A B A B, and medians are compared, since machines are shared and noisy. Prints
a Markdown table and writes it with all measurements to ``output_dir``.
"""

import json
import math
import pathlib
import statistics
import subprocess
import sys

from absl import app, flags

from benchmarks.zoo import ZOO

FLAGS = flags.FLAGS
flags.DEFINE_list("models", list(ZOO), "models of benchmarks/zoo.py")
flags.DEFINE_integer("repeats", 3, "processes for each of plain and private")
flags.DEFINE_integer("steps", 12, "steps a process")
flags.DEFINE_integer("batch_size", 0, "rows of a batch; 0: the model's own")
flags.DEFINE_integer("microbatch_size", 0, "microbatch_size of the DP optimizer; 0: none")
flags.DEFINE_bool("jit_compile", False, "compile the steps with XLA")
flags.DEFINE_string("output_dir", "output/bench", "folder for results.json and results.md")

_HEADER = (
    "| model | batch | plain step | private step | ratio | first step | peak memory |\n"
    "|---|---|---|---|---|---|---|"
)


def _measure(model, mode):
    command = [
        sys.executable,
        "-m",
        "benchmarks.measure",
        f"--model={model}",
        f"--mode={mode}",
        f"--steps={FLAGS.steps}",
        f"--batch_size={FLAGS.batch_size}",
        f"--microbatch_size={FLAGS.microbatch_size if mode == 'private' else 0}",
        f"--jit_compile={FLAGS.jit_compile}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _row(model, measured):
    medians = {
        mode: {
            key: statistics.median(m[key] for m in measured if m["mode"] == mode)
            for key in ("step_s", "first_step_s", "peak_rss_mb")
        }
        for mode in ("plain", "private")
    }
    plain, private = medians["plain"], medians["private"]
    ratio = {key: private[key] / plain[key] for key in plain}
    text = (
        f"| {model} | {measured[0]['rows']} | {1e3 * plain['step_s']:.1f} ms "
        f"| {1e3 * private['step_s']:.1f} ms | {ratio['step_s']:.2f}x "
        f"| {private['first_step_s']:.1f} s, {ratio['first_step_s']:.1f}x "
        f"| {private['peak_rss_mb']:.0f} MB, {ratio['peak_rss_mb']:.2f}x |"
    )
    return text, ratio["step_s"]


def main(argv):
    """Measures the models that the flags name."""
    del argv
    output = pathlib.Path(FLAGS.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    measurements, lines, ratios = [], [_HEADER], []
    print(_HEADER, flush=True)
    for model in FLAGS.models:
        measured = [
            _measure(model, mode) for _ in range(FLAGS.repeats) for mode in ("plain", "private")
        ]
        measurements += measured
        line, ratio = _row(model, measured)
        print(line, flush=True)
        lines.append(line)
        ratios.append(ratio)
    mean = math.exp(statistics.fmean(math.log(r) for r in ratios))
    lines.append(f"\nGeometric mean of the step ratios: {mean:.2f}x; worst {max(ratios):.2f}x.")
    print(lines[-1])
    (output / "results.json").write_text(json.dumps(measurements, indent=1) + "\n")
    (output / "results.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
