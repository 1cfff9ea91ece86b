"""How long a private step takes on a pod, from the work of a compiled one and public peaks.

    python -m benchmarks.tpu.cost --results_dir=output/tpu --page=docs/scale.md

A step is four things, one after the other (nothing is assumed to overlap):

    compute     rows a replica x max(operations / (reached share x peak), bytes / bandwidth)
    all-reduce  2 (n - 1) / n x 4 bytes x weights / bandwidth of all links, and the hops of a ring
                along each axis
    noise       weights x max(operations of a normal / peak of the vector unit, bytes / bandwidth)
    update      bytes of the optimizer's update / bandwidth

The first shrinks with replicas, the others do not: each replica draws all of the noise and updates
all of the weights, so that nothing but the gradients is sent.
"""

import dataclasses
import math
import pathlib

from absl import app, flags

from benchmarks import chart, page, tables
from benchmarks.tpu import cases, report

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip of a pod, by its maker's figures.

    Attributes:
      flops: operations a second of the matrix unit, bfloat16.
      vector_ops: operations a second of the vector unit, 32 bits.
      bandwidth: bytes a second of its memory.
      memory: bytes.
      link_bandwidth: bytes a second that it can send to its neighbours, all links together.
      axes: dimensions of the torus that links make.
      hop_s: seconds to a neighbour.
    """

    flops: float
    vector_ops: float
    bandwidth: float
    memory: float
    link_bandwidth: float
    axes: int = 2
    hop_s: float = 1e-6


# cloud.google.com/tpu/docs/v5e: 197 TFLOP/s, 16 GB, 819 GB/s, 1,600 Gbit/s between chips, a
# two-dimensional torus. The vector unit is not in that table: 8 x 128 lanes of four 32-bit units at
# 1.5 GHz (Austin et al. 2025, "How to Scale Your Model", chapter 2), and a hop of 1 us (the same,
# chapter 3).
V5E = Chip(
    flops=197e12, vector_ops=8 * 128 * 4 * 1.5e9, bandwidth=819e9, memory=16e9, link_bandwidth=200e9
)


@dataclasses.dataclass(frozen=True)
class Work:
    """What one replica has to do.

    Attributes:
      parameters: trained weights.
      row_flops, row_bytes: for each row of its batch.
      step_bytes: moved once a step whatever the batch, but for noise.
      normal_ops, normal_bytes: for the normal that each weight gets.
      memory: bytes that a core held when this was counted.
    """

    parameters: int
    row_flops: float
    row_bytes: float
    step_bytes: float
    normal_ops: float = 0.0
    normal_bytes: float = 0.0
    memory: float = 0.0


# LAMB in float32: the gradient read, weight and two moments read and written; then weight and
# update read again for their norms, and the update written.
UPDATE_BYTES = 4 * (1 + 6 + 3)


def work(rows, record, normal=(0.0, 0.0)):
    """The work of a step, from a compiled program without noise.

    Args:
      rows: int, of its batch.
      record: of ``benchmarks.tpu.compile``.
      normal: operations, and bytes moved, of the normal that each weight gets.

    Returns:
      :class:`Work`. All but the update is counted as work for the rows. Some of it, such as
      reading the weights, is not, so that with more rows a row costs less than this says.
    """
    update = UPDATE_BYTES * record["parameters"]
    return Work(
        parameters=record["parameters"],
        row_flops=record["flops"] / rows,
        row_bytes=max(record["bytes_accessed"] - update, 0) / rows,
        step_bytes=update,
        normal_ops=normal[0],
        normal_bytes=normal[1],
        memory=report.memory(record),
    )


def deeper(one, two, blocks):
    """The work of a model of ``blocks`` equal blocks, from those of one block and of two.

    Args:
      one, two: :class:`Work` of models that differ in one block.
      blocks: int.
    """
    values = {
        field.name: getattr(one, field.name)
        + (blocks - 1) * (getattr(two, field.name) - getattr(one, field.name))
        for field in dataclasses.fields(Work)
    }
    return Work(**values)


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a step, part by part."""

    compute: float
    all_reduce: float
    noise: float
    update: float

    @property
    def total(self):
        """All parts, one after the other."""
        return self.compute + self.all_reduce + self.noise + self.update


def step(work, chip, *, replicas, batch_size, reached=0.4):
    """How long a step takes.

    Args:
      work: :class:`Work` of a replica.
      chip: :class:`Chip`.
      replicas: int, chips that train together.
      batch_size: int, rows of a step over all replicas; each has as many, rounded up.
      reached: share of the matrix unit's peak that the model reaches, in (0, 1].

    Returns:
      :class:`Step`.

    Raises:
      ValueError: for numbers that no step has.
    """
    for name, value in (("replicas", replicas), ("batch_size", batch_size)):
        if value < 1 or value != int(value):
            raise ValueError(f"{name} must be a whole number of at least 1. Received: {value!r}")
    if not 0 < reached <= 1:
        raise ValueError(f"reached must be above 0 and at most 1. Received: {reached!r}")
    rows = math.ceil(batch_size / replicas)
    row = max(work.row_flops / (reached * chip.flops), work.row_bytes / chip.bandwidth)
    sent = 2 * (replicas - 1) / replicas * 4 * work.parameters
    hops = 2 * chip.axes * (replicas ** (1 / chip.axes) - 1)
    normal = max(work.normal_ops / chip.vector_ops, work.normal_bytes / chip.bandwidth)
    return Step(
        compute=rows * row,
        all_reduce=sent / chip.link_bandwidth + hops * chip.hop_s,
        noise=work.parameters * normal,
        update=work.step_bytes / chip.bandwidth,
    )


def run_hours(work, chip, *, replicas, batch_size, examples, epochs, reached=0.4):
    """Hours of a whole run: ceil(examples / batch_size) steps an epoch."""
    steps = epochs * math.ceil(examples / batch_size)
    seconds = step(work, chip, replicas=replicas, batch_size=batch_size, reached=reached).total
    return steps * seconds / 3600


IMAGENET = 1_281_167
BATCH, EPOCHS = 16_384, 90
REPLICAS = (1, 8, 32, 128, 256)


def measured(found, model, private=True):
    """:class:`Work` of a model of ``cases.COSTED``, or None when it was not compiled.

    Args:
      found: :class:`~benchmarks.tpu.cases.Results`.
      model: name in ``cases.COSTED``.
      private: whether of the private step.
    """
    loud, quiet, *both = cases.cost_plan([model])
    (case,) = [case for case in both if case.private == private]
    if any("flops" not in (found.get(needed) or {}) for needed in (loud, quiet, case)):
        return None
    if not private:
        return work(case.batch_size, found.get(case))
    with_noise, without = found.get(loud), found.get(quiet)
    normal = [
        (with_noise[key] - without[key]) / with_noise["parameters"]
        for key in ("flops", "bytes_accessed")
    ]
    return work(case.batch_size, found.get(case), normal)


def models_of(found):
    """{name: (:class:`Work` of the private step, of the plain one)} of what was compiled."""
    works = {
        model: (measured(found, model), measured(found, model, private=False))
        for model in cases.COSTED
    }
    works = {model: pair for model, pair in works.items() if None not in pair}
    if {"vit_l_1", "vit_l_2"} <= set(works):
        one, two = works.pop("vit_l_1"), works.pop("vit_l_2")
        works["vit_l"] = tuple(deeper(*pair, blocks=24) for pair in zip(one, two))
    return works


HEADER = (
    "model",
    "replicas",
    "compute",
    "all-reduce",
    "noise",
    "update",
    "private step",
    "plain step",
    "ratio",
    f"{EPOCHS} epochs",
)


def rows(name, private, plain):
    """Lines of the table: a model on more and more replicas."""
    lines = []
    for replicas in REPLICAS:
        shared = {"replicas": replicas, "batch_size": BATCH}
        ours, theirs = step(private, V5E, **shared), step(plain, V5E, **shared)
        hours = run_hours(private, V5E, **shared, examples=IMAGENET, epochs=EPOCHS)
        parts = [ours.compute, ours.all_reduce, ours.noise, ours.update, ours.total, theirs.total]
        lines.append(
            [
                name,
                str(replicas),
                *map(tables.seconds, parts),
                f"{ours.total / theirs.total:.2f}x",
                f"{hours:.1f} h",
            ]
        )
    return lines


def main(argv):
    """Prints the table of a run on ImageNet and draws it."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    found = cases.Results(pathlib.Path(FLAGS.results_dir) / "results.jsonl")
    lines, curves, figures = [], {}, []
    for model, (private, plain) in models_of(found).items():
        lines += rows(model, private, plain)
        figures += _figures(model, private, plain)
        numbers = [2**k for k in range(11)]
        steps = [step(private, V5E, replicas=n, batch_size=BATCH) for n in numbers]
        curves[f"{model}, whole step"] = (numbers, [s.total for s in steps])
        curves[f"{model}, compute"] = (numbers, [s.compute for s in steps])
        curves[f"{model}, the rest"] = (numbers, [s.total - s.compute for s in steps])
    text = f"{tables.markdown(FIGURES, figures)}\n{tables.markdown(HEADER, lines)}"
    print(text)
    if FLAGS.page:
        path = pathlib.Path(FLAGS.page)
        picture = path.with_name(f"{path.stem}-cost.svg")
        title = f"A private step on v5e, {BATCH:,} images"
        chart.curves(curves, picture, "replicas", "seconds", title)
        page.replace_block(path, "cost", f"![{title}]({picture.name})\n\n{text}")


FIGURES = (
    "model",
    "step",
    "weights",
    "GFLOP a row",
    "MB a row",
    "operations, bytes a normal",
    "memory of 16 rows",
)


def _figures(model, private, plain):
    return [
        [
            model,
            name,
            f"{work.parameters / 1e6:.1f} M",
            f"{work.row_flops / 1e9:.1f}",
            f"{work.row_bytes / 1e6:,.0f}",
            f"{work.normal_ops:.0f}, {work.normal_bytes:.0f}" if work.normal_ops else "",
            f"{work.memory / 1e9:.1f} GB",
        ]
        for name, work in (("private", private), ("plain", plain))
    ]


if __name__ == "__main__":
    flags.DEFINE_string("results_dir", "output/tpu", "where benchmarks.tpu.run wrote its results")
    flags.DEFINE_string("page", None, "Markdown file whose block 'cost' gets the tables")
    app.run(main)
