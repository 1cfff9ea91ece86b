"""The memory of a private step on a batch that is there already; prints a line of JSON.

    python -m benchmarks.step_memory --model=cnn --batch_size=65536 --microbatch_size=256

``train_on_batch`` gets tensors, so that the batch is in memory once. Peak memory is the largest
resident set while it runs, after a first call that traces; what making the data took is forgotten.
Linux alone can forget it.
"""

import keras
import tensorflow as tf
from absl import app

from benchmarks import clock, fit, measure


def _measure(entry, batch_size, step_clock):
    model = entry.build()
    fit.compile_classifier(model, measure.optimizer(batch_size), jit_compile=False)
    x, y = entry.data(batch_size)
    x, y = tf.convert_to_tensor(x), tf.convert_to_tensor(y)
    model.train_on_batch(x, y)
    clock.forget_peak()
    step_clock.run(lambda: model.train_on_batch(x, y))
    return model.count_params(), f"Keras {keras.__version__} on TensorFlow {tf.__version__}"


def main(argv):
    """Measures what the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    clock.report(_measure)


if __name__ == "__main__":
    clock.define_flags(measure.MODES)
    app.run(main)
