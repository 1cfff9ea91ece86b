"""What accumulation and augmented copies cost, against the plain private step, in one process.

    python -m benchmarks.logical_batches --model=cnn

The ways take turns, so that whatever else the machine does slows all of them. Prints a line of JSON
with the median seconds of an update, and ratios of these.
"""

import json
import statistics
import time

import keras
from absl import app, flags

import keras_dp
from benchmarks import fit
from benchmarks.zoo import ZOO

FLAGS = flags.FLAGS
L2_NORM_CLIP = 1.0


def _ways(entry, size, k):
    """For each way of training: its name, optimizer, rows of a batch, and batches of an update."""
    privacy = dict(l2_norm_clip=L2_NORM_CLIP, noise_multiplier=1.0, batch_size=size)
    sgd, dp = keras.optimizers.SGD, keras_dp.DPSGD
    return {
        "plain Keras": (sgd(0.01), size, 1),
        "plain Keras, k batches": (sgd(0.01), k * size, 1),
        "private": (dp(0.01, **privacy), size, 1),
        "private, k batches": (dp(0.01, **privacy), k * size, 1),
        "microbatches": (dp(0.01, microbatch_size=size, **privacy), k * size, 1),
        "accumulation": (dp(0.01, gradient_accumulation_steps=k, **privacy), size, k),
        "augmentations": (dp(0.01, augmentations=k, **privacy), size, 1),
        "users": (dp(0.01, examples_per_user=k, **privacy), k * size, 1),
    }


def measure(name, size, k, rounds):
    """Seconds of an update of each way: medians over ``rounds``, the first of which is left out."""
    entry = ZOO[name]
    size = size or entry.batch_size
    runs, seconds = {}, {}
    for way, (optimizer, rows, batches) in _ways(entry, size, k).items():
        model = entry.build()
        fit.compile_classifier(model, optimizer, jit_compile=False)
        runs[way] = (model, entry.data(rows), batches)
        seconds[way] = []
    for _ in range(rounds + 1):
        for way, (model, data, batches) in runs.items():
            start = time.perf_counter()
            for _ in range(batches):
                model.train_on_batch(*data)
            seconds[way].append(time.perf_counter() - start)
    median = {way: statistics.median(values[1:]) for way, values in seconds.items()}
    return {
        "model": name,
        "rows": size,
        "k": k,
        "seconds": median,
        "accumulation / k private steps": median["accumulation"] / (k * median["private"]),
        "accumulation / private step of k batches": median["accumulation"]
        / median["private, k batches"],
        "augmentations / k private steps": median["augmentations"] / (k * median["private"]),
        "augmentations / private step of k batches": median["augmentations"]
        / median["private, k batches"],
        "augmentations / plain Keras on as many rows": median["augmentations"]
        / median["plain Keras, k batches"],
        "users / private step of k batches": median["users"] / median["private, k batches"],
    }


def main(argv):
    """Measures what the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    print(json.dumps(measure(FLAGS.model, FLAGS.batch_size, FLAGS.k, FLAGS.rounds)))


if __name__ == "__main__":
    flags.DEFINE_enum("model", None, list(ZOO), "model of benchmarks/zoo.py", required=True)
    flags.DEFINE_integer("batch_size", 0, "examples of a step; 0: the model's own", 0)
    flags.DEFINE_integer("k", 4, "batches of an update, and copies of an example", 2)
    flags.DEFINE_integer("rounds", 8, "how often all ways take their turn", 1)
    app.run(main)
