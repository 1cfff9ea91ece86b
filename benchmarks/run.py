"""Compares private training with plain Keras on the zoo: step time, first step, peak memory.

    python -m benchmarks.run --models=mlp,cnn --repeats=3
    python -m benchmarks.run --jit_compile=false,true --backends=auto,vectorized
    python -m benchmarks.run --models=mlp --batch_size=4096 --microbatch_size=256
    python -m benchmarks.run --microbatches     # large batches of benchmarks/zoo.py, in pieces
    python -m benchmarks.run --table_only       # the tables of what was measured before

Every measurement is a process of its own (``benchmarks.measure``); plain and private ones take
turns. Measurements are appended to ``results.jsonl`` in ``--output_dir``, one line each; the
tables (``results.md``) and the chart (``chart.svg``) are made of all that the file holds.
"""

import os
import platform
import sys

from absl import app, flags

from benchmarks import page, runner, tables
from benchmarks.cases import Case
from benchmarks.zoo import OWN, ZOO

FLAGS = flags.FLAGS
BACKENDS = ("auto", "layerwise", "vectorized", "loop")


def _define_flags():
    runner.define_flags("output/bench")
    flags.DEFINE_list("models", list(OWN), "models of benchmarks/zoo.py")
    flags.DEFINE_list("backends", ["auto"], f"backends of keras_dp, of {', '.join(BACKENDS)}")
    flags.DEFINE_list("jit_compile", ["false"], "false, true or false,true: with XLA")
    flags.DEFINE_integer("batch_size", None, "examples of a step; none: the model's own", 1)
    flags.DEFINE_integer("microbatch_size", None, "microbatch_size of the private steps", 1)
    flags.DEFINE_bool("microbatches", False, "the large batch and microbatches of the zoo")
    runner.require_among("models", ZOO)
    runner.require_among("backends", BACKENDS)
    runner.require_among("jit_compile", ("false", "true"))


def groups(models, backends, jit_compile, batch_size, microbatch_size, microbatches):
    """The cases that the flags name: a list a model and jit_compile, plain Keras first."""
    found = []
    for model in models:
        rows, micro = batch_size or ZOO[model].batch_size, microbatch_size
        if microbatches:
            rows, micro = ZOO[model].large
        for jit in jit_compile:
            private = [Case(model, "keras_dp", b, rows, micro, jit == "true") for b in backends]
            found.append([private[0].baseline, *private])
    return found


def machine():
    """A line about where this runs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB, {platform.system()}"


def write(found, page_path):
    """Writes the tables and the chart of all that was measured.

    Args:
      found: :class:`~benchmarks.cases.Results`.
      page_path: None, or a Markdown file whose block "zoo" is replaced; the chart goes beside it.

    Returns:
      The tables.
    """
    text, series = f"{machine()}; {tables.own(found)}", tables.ratios(found)
    label, title = "private step / plain Keras step", "What privacy costs a step"
    page.publish(text, series, label, title, found.path.parent, page_path, "zoo")
    return text


def main(argv):
    """Measures what the flags name and makes the tables."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    found = runner.results()
    if not FLAGS.table_only:
        wanted = groups(
            FLAGS.models,
            FLAGS.backends,
            FLAGS.jit_compile,
            FLAGS.batch_size,
            FLAGS.microbatch_size,
            FLAGS.microbatches,
        )
        runner.measure(found, wanted, lambda case: [sys.executable, "-m", "benchmarks.measure"])
    print(write(found, FLAGS.page))


if __name__ == "__main__":
    _define_flags()
    app.run(main)
