"""Does memory grow with the logical batch? One private step of many examples, in microbatches.

    python -m benchmarks.memory --model=cnn --many=65536 --few=256

Both steps are ``benchmarks.step_memory`` in a process of its own: ``--many`` examples in
microbatches of ``--few``, and ``--few`` examples in one pass. Their peak memory is compared after
the data itself was taken off.
"""

import pathlib
import sys

from absl import app, flags

from benchmarks import page, runner, tables
from benchmarks.cases import Case
from benchmarks.zoo import ZOO

FLAGS = flags.FLAGS


def _define_flags():
    runner.define_flags("output/memory")
    FLAGS.set_default("steps", 2)
    flags.DEFINE_enum("model", "cnn", list(ZOO), "model of benchmarks/zoo.py")
    flags.DEFINE_integer("many", 65_536, "examples of the large step", 1)
    flags.DEFINE_integer("few", 256, "examples of the small step and of a microbatch", 1)


def table(found, many, few):
    """A Markdown table of the two cases and their ratio."""
    rows, needed = [], []
    for case in (few, many):
        value, batch = found.median(case), tables.batch(case)
        if value is None:
            rows.append([case.model, batch, found.error(case), "", ""])
            continue
        data = data_mb(case)
        needed.append(value["peak_rss_mb"] - data)
        peaks = [f"{number:.0f} MB" for number in (value["peak_rss_mb"], data, needed[-1])]
        rows.append([case.model, batch, *peaks])
    text = tables.markdown(["model", "batch", "peak memory", "the data", "without it"], rows)
    if len(needed) == 2:
        text += (
            f"\nThe large step takes {needed[1] / needed[0]:.2f}x the memory of the small one.\n"
        )
    return text


def data_mb(case):
    """Size of the examples and labels of a step, in units of 2^20 bytes."""
    x, y = ZOO[case.model].data(1)
    return case.batch_size * (x.nbytes + y.nbytes) / 2**20


def main(argv):
    """Measures both steps and compares them."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    found = runner.results()
    many = Case(FLAGS.model, "keras_dp", "auto", FLAGS.many, FLAGS.few)
    few = Case(FLAGS.model, "keras_dp", "auto", FLAGS.few)
    if not FLAGS.table_only:
        program = [sys.executable, "-m", "benchmarks.step_memory"]
        runner.measure(found, [[few, many]], lambda case: program)
    text = table(found, many, few)
    (found.path.parent / "results.md").write_text(text)
    if FLAGS.page:
        page.replace_block(pathlib.Path(FLAGS.page), "memory", text)
    print(text)


if __name__ == "__main__":
    _define_flags()
    app.run(main)
