"""What plain and private steps must do, against what this machine can do and what they reach.

    python -m benchmarks.roofline --results_dir=output/bench

Prints two Markdown tables. The first has, for each model of the zoo, the operations and bytes of a
step (``benchmarks.work``), the least time that the machine's peaks allow for them, part by part,
and the share of it that the steps measured by ``benchmarks.run`` reach. Peaks are measured: a big
matrix product, a big sum in memory, and keras_dp's own noise. The second table has the way in
which the norms of every weight are found.
"""

import dataclasses
import itertools
import pathlib
import time

import tensorflow as tf
from absl import app, flags

import keras_dp
from benchmarks import clock, fit, page, tables, work
from benchmarks.cases import Case, Results
from benchmarks.zoo import OWN, ZOO
from keras_dp.clipping import layerwise
from keras_dp.noise import GaussianNoise

FLAGS = flags.FLAGS


@dataclasses.dataclass(frozen=True)
class Machine:
    """Peaks: operations a second, bytes a second, normals a second."""

    flops: float
    bandwidth: float
    normals: float


def measure_machine(side=2048, numbers=2**26):
    """Measures the peaks, each by the best of several runs.

    Args:
      side: of the square matrices that are multiplied.
      numbers: of the vectors that are added.
    """
    matrix, noise = tf.random.normal([side, side]), GaussianNoise()
    vector, total = tf.random.normal([numbers]), tf.Variable(tf.zeros([numbers]))
    normals = numbers // 16
    flops = 2 * side**3 / _best(lambda: tf.matmul(matrix, matrix))
    # In memory that is there already: to get it from the system takes longer than to fill it.
    bandwidth = 12 * numbers / _best(lambda: total.assign_add(vector))
    return Machine(flops, bandwidth, normals / _best(lambda: noise.draw([[normals]], 1.0)))


def _best(run, runs=5):
    """The least seconds of a computation in a graph whose result is one number."""

    @tf.function(autograph=False)
    def graph():
        return tf.reshape(tf.nest.flatten(run())[0], [-1])[0]

    graph()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        float(graph())
        times.append(time.perf_counter() - start)
    return min(times)


def ways(model, batch_size, data):
    """How the layerwise backend finds the norms of each weight of a compiled model.

    Args:
      model: compiled with a DP optimizer.
      batch_size: examples of a step.
      data: ``(x, y)`` of one batch.

    Returns:
      {variable path: (way, whether the gradient of every example is kept)}.
    """
    found = {}
    variables = list(model.trainable_variables)

    def trace(x, y):
        forms, _ = layerwise.weight_forms(model, None, variables, (x, y, None))
        for variable in variables:
            form = forms[id(variable)]
            form.squared_norms()  # the choice is made here
            sizes = [t.shape[1:].num_elements() for t in form.tensors()]
            way = getattr(form, "way", type(form).__name__)
            found[variable.path] = (way, variable.shape.num_elements() in sizes)

    specs = [tf.TensorSpec([batch_size, *values.shape[1:]], values.dtype) for values in data]
    tf.function(trace, autograph=False).get_concrete_function(*specs)
    return found


def _private_model(entry):
    model = entry.build()
    optimizer = keras_dp.DPSGD(
        clock.LEARNING_RATE,
        l2_norm_clip=clock.L2_NORM_CLIP,
        noise_multiplier=clock.NOISE_MULTIPLIER,
        batch_size=entry.batch_size,
    )
    fit.compile_classifier(model, optimizer)
    return model


def bounds(layers, batch, kept, machine):
    """Work and least time of a plain and of a private step.

    Returns:
      ((flops, bytes, seconds) of the plain step, the same of the private one).
    """
    plain = work.plain(layers, batch)
    private = [*plain, *work.private(layers, batch, kept)]
    noise = sum(layer.weights for layer in layers) / machine.normals

    def total(parts, more):
        return (
            sum(part.flops for part in parts),
            sum(part.bytes for part in parts),
            sum(part.seconds(machine) for part in parts) + more,
        )

    return total(plain, 0), total(private, noise)


def row(name, plain, private, measured):
    """A line of the first table.

    Args:
      name: of the model.
      plain, private: as of :func:`bounds`.
      measured: the two steps in seconds, or None where it was not measured.
    """
    cells = [name]
    for flops, moved, least in (plain, private):
        cells += [f"{flops / 1e9:.2f}", f"{moved / 1e6:.0f}", tables.seconds(least)]
    cells.append(f"{private[2] / plain[2]:.2f}x")
    for (_, _, least), step in zip((plain, private), measured):
        cells.append(f"{tables.seconds(step)}, {100 * least / step:.0f} %" if step else "")
    return cells


HEADER = (
    "model",
    "plain GFLOP",
    "MB",
    "least time",
    "private GFLOP",
    "MB",
    "least time",
    "least ratio",
    "plain step, share reached",
    "private step, share reached",
)


def way_rows(name, model, chosen):
    """Lines of the second table: alike weights of a model share a line, with their number."""
    kinds = []
    for layer in model.layers:
        for variable in layer.trainable_variables:
            way = chosen[variable.path][0]
            shape = " x ".join(map(str, variable.shape))
            kinds.append((type(layer).__name__, variable.name, shape, way))
    counts = {}
    for kind in kinds:
        counts[kind] = counts.get(kind, 0) + 1
    first = itertools.chain([name], itertools.repeat(""))
    return [[next(first), *kind, str(count)] for kind, count in counts.items()]


def _measured(found, entry_name):
    batch = ZOO[entry_name].batch_size
    private = Case(entry_name, "keras_dp", "auto", batch)
    values = [found.median(case) for case in (private.baseline, private)]
    return [value and value["step_s"] for value in values]


def main(argv):
    """Prints the tables for the models that the flags name."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    found = Results(pathlib.Path(FLAGS.results_dir) / "results.jsonl")
    machine = measure_machine()
    lines, way_lines = [], []
    for name in FLAGS.models:
        entry, model = ZOO[name], _private_model(ZOO[name])
        chosen = ways(model, entry.batch_size, entry.data(1))
        kept = {path for path, (_, keeps) in chosen.items() if keeps}
        plain, private = bounds(work.layers_of(model), entry.batch_size, kept, machine)
        lines.append(row(f"{name} {entry.batch_size}", plain, private, _measured(found, name)))
        way_lines += way_rows(name, model, chosen)
    text = (
        f"Peaks measured here: {machine.flops / 1e9:.0f} GFLOP/s (a product of 2048 x 2048 "
        f"matrices), {machine.bandwidth / 1e9:.1f} GB/s (256 MB added to 256 MB, in place), "
        f"{machine.normals / 1e6:.0f} million normals a second.\n\n"
        f"{tables.markdown(HEADER, lines)}\n"
        f"{tables.markdown(['model', 'layer', 'weight', 'shape', 'way', 'weights'], way_lines)}"
    )
    print(text)
    if FLAGS.page:
        page.replace_block(pathlib.Path(FLAGS.page), "roofline", text)


if __name__ == "__main__":
    flags.DEFINE_list("models", list(OWN), "models of benchmarks/zoo.py")
    flags.DEFINE_string("results_dir", "output/bench", "where benchmarks.run wrote its results")
    flags.DEFINE_string("page", None, "Markdown file whose block 'roofline' gets the tables")
    app.run(main)
