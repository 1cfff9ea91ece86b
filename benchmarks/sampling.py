"""The sampler: is its law Poisson, what does a draw cost, and does the step ever wait for it?

    python -m benchmarks.sampling

1. Law: 200,000 draws of 10 examples with q = 0.3, against what Poisson sampling says.
2. Cost of a draw at N = 10^4, 10^6 and 10^8 (a source that computes its rows, as nothing else
   of that size fits here), with the memory that it takes beside its batch.
3. Examples per second out of each kind of source.
4. The share of its time that a training loop waits for its batches, which are read beside the
   private steps.

Prints Markdown tables and writes them, and results.json, into --output_dir.
"""

import json
import operator
import pathlib
import statistics
import tempfile
import time
import tracemalloc
import warnings

import h5py
import keras
import numpy as np
from absl import app, flags
from scipy.stats import binom

import keras_dp
from benchmarks import tables
from benchmarks.zoo import ZOO
from keras_dp.sampling import draws

FLAGS = flags.FLAGS


class Computed:
    """Rows of 28x28 bytes that are computed from their index."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        return np.broadcast_to(
            (indices % 256).astype(np.uint8)[:, None, None], (len(indices), 28, 28)
        )


class OneByOne:
    """Gives one row for an int, as data sets of files do."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[operator.index(index)]


def law(number=200_000, n=10, q=0.3):
    """What was drawn, what Poisson sampling says, and the difference in standard errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the seed
        sampler = keras_dp.PoissonSampler(np.arange(n), batch_size=round(n * q), seed=0)
    member = np.zeros((number, n), bool)
    for k in range(number):
        x, _, weight = sampler[k % len(sampler)]
        member[k, x[weight == 1]] = True
    sizes = member.sum(1)
    moment = np.sum(binom.pmf(np.arange(n + 1), n, q) * (np.arange(n + 1) - n * q) ** 4)
    variance = n * q * (1 - q)
    pairs = (member.T.astype(float) @ member / number)[np.triu_indices(n, 1)]
    steps = member[:-1].T.astype(float) @ member[1:] / (number - 1)
    rows = []

    def add(name, found, expected, error):
        worst = np.max(np.abs(np.ravel(found) - expected)) / error
        rows.append(
            {
                "what": name,
                "expected": expected,
                "mean": float(np.mean(found)),
                "numbers": int(np.size(found)),
                "worst_z": float(worst),
            }
        )

    def proportion(p):
        return np.sqrt(p * (1 - p) / number)

    add("one example drawn", member.mean(0), q, proportion(q))
    add("two examples drawn together", pairs, q * q, proportion(q * q))
    add("drawn in a step and in the next", steps, q * q, proportion(q * q))
    add("mean size", sizes.mean(), n * q, np.sqrt(variance / number))
    add("variance of the size", sizes.var(), variance, np.sqrt((moment - variance**2) / number))
    return rows


def seconds(function, repeats=30):
    """Median wall time of a call."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def costs():
    """Time and memory of draws from sources of several sizes."""
    rows = []
    for n in (10**4, 10**6, 10**8):
        for batch_size in (256, 4096):
            sampler = keras_dp.PoissonSampler(Computed(n), batch_size=batch_size)
            draw = draws.Draws().next(0)
            indices = seconds(
                lambda d=draw, n=n, b=batch_size: draws.poisson_indices(d.generator, n, b / n)
            )
            whole = seconds(lambda s=sampler: s[0])
            tracemalloc.start()
            sampler[0]
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            batch = sampler.capacity * (28 * 28 + 4)
            rows.append(
                {
                    "N": n,
                    "batch_size": batch_size,
                    "indices_us": indices * 1e6,
                    "batch_ms": whole * 1e3,
                    "batch_mb": batch / 2**20,
                    "peak_mb": peak / 2**20,
                }
            )
    return rows


def throughput(folder, n=60_000, batch_size=4096):
    """Examples per second out of each kind of source, 28x28 bytes each."""
    pixels = np.random.default_rng(0).integers(0, 256, (n, 28, 28), np.uint8)
    np.save(folder / "x.npy", pixels)
    with h5py.File(folder / "x.h5", "w") as file:
        file["x"] = pixels
    records = keras_dp.write_array_record(iter(pixels), folder / "records", verbose=0)
    to_unit = {"map_fn": lambda x: x * np.float32(1 / 255)}
    with_rng = {"map_fn": lambda x, rng: np.roll(x, rng.integers(-2, 3, 2), (0, 1))}
    users = np.arange(n) // 16
    sources = {
        "array": (pixels, {}),
        "memory map": (np.load(folder / "x.npy", mmap_mode="r"), {}),
        "HDF5": (h5py.File(folder / "x.h5")["x"], {}),
        "array_record folder": (records, {}),
        "one by one": (OneByOne(pixels), {}),
        "array, drawn by users of 16": (
            pixels,
            dict(users=users, examples_per_user=16, batch_size=max(1, batch_size // 16)),
        ),
        "array, scaled by map_fn": (pixels, to_unit),
        "array, shifted by map_fn with rng": (pixels, with_rng),
    }
    rows = []
    for name, (source, arguments) in sources.items():
        sampler = keras_dp.PoissonSampler(source, **{"batch_size": batch_size, **arguments})
        taken = seconds(lambda s=sampler: s[0], repeats=8)
        rows.append({"source": name, "batch_ms": taken * 1e3, "examples_per_s": batch_size / taken})
    return rows


def waiting(models, steps):
    """Private steps on batches that are read beside them, and the time until each is there."""
    rows = []
    for name in models:
        entry = ZOO[name]
        x, y = entry.data(20_000)
        model = entry.build()
        optimizer = keras_dp.DPSGD(
            0.01, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=entry.batch_size
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss)
        for kind, arguments in {"arrays": {}, "map_fn with rng": {"map_fn": augmented}}.items():
            sampler = keras_dp.PoissonSampler(x, y, batch_size=entry.batch_size, **arguments)
            alone = seconds(lambda s=sampler: s[0], repeats=5)
            batches = iter(sampler.as_tf_dataset(endless=True))
            for _ in range(3):
                model.train_on_batch(*next(batches))
            waited, begun = 0.0, time.perf_counter()
            for _ in range(steps):
                start = time.perf_counter()
                batch = next(batches)
                waited += time.perf_counter() - start
                model.train_on_batch(*batch)
            total = time.perf_counter() - begun
            rows.append(
                {
                    "model": name,
                    "batch_size": entry.batch_size,
                    "input": kind,
                    "batch_alone_ms": alone * 1e3,
                    "step_ms": total / steps * 1e3,
                    "waited_ms": waited / steps * 1e3,
                    "share": waited / total,
                }
            )
    return rows


def augmented(x, y, rng):
    """Adds nothing, at the cost of a random number and a copy."""
    return x + 0 * x.dtype.type(rng.integers(2)), y


def text(results):
    """The results as Markdown."""
    parts = []
    for title, rows in results.items():
        cells = [[_shown(value) for value in row.values()] for row in rows]
        parts.append(f"### {title}\n\n{tables.markdown(list(rows[0]), cells)}")
    return "\n".join(parts)


def _shown(value):
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value


def main(argv):
    """Measures everything."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    results = {"law": law(), "cost of a draw": costs()}
    with tempfile.TemporaryDirectory() as folder:
        results["sources"] = throughput(pathlib.Path(folder))
    results["waiting for input"] = waiting(FLAGS.models, FLAGS.steps)
    output = pathlib.Path(FLAGS.output_dir)
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    (output / "results.md").write_text(text(results))
    print(text(results))


if __name__ == "__main__":
    flags.DEFINE_list("models", ["mlp", "cnn", "text"], "models of benchmarks/zoo.py to wait with")
    flags.DEFINE_integer("steps", 40, "steps that may have to wait", 1)
    flags.DEFINE_string("output_dir", "output/sampling", "where results are written")
    app.run(main)
