"""Times one way of training one model, in a process of its own, and prints a line of JSON.

    python -m benchmarks.measure --model=cnn --mode=private

``model.fit`` runs on random data that is in memory already. A step is timed from
``on_train_batch_begin`` to the moment the loss can be read. Peak memory is the process's
largest resident set.
"""

import json
import resource
import statistics
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import keras_dp
from benchmarks.zoo import ZOO

FLAGS = flags.FLAGS
flags.DEFINE_enum("model", "cnn", list(ZOO), "model of benchmarks/zoo.py")
flags.DEFINE_enum("mode", "private", ["plain", "private"], "plain Keras SGD, or keras_dp.DPSGD")
flags.DEFINE_integer("batch_size", 0, "rows of a batch; 0: the model's own")
flags.DEFINE_integer("microbatch_size", 0, "microbatch_size of the DP optimizer; 0: none")
flags.DEFINE_enum("backend", "auto", ["auto", "layerwise", "vectorized", "loop"], "its backend")
flags.DEFINE_bool("jit_compile", False, "compile the step with XLA")
flags.DEFINE_integer("steps", 12, "steps; the first three are left out")

WARM_UP = 3


class _Clock(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        float(logs["loss"])  # waits for the step
        self.seconds.append(time.perf_counter() - self._start)


def _data(model, rows):
    rng = np.random.default_rng(0)
    shape = (rows, *model.input_shape[1:])
    if "int" in model.inputs[0].dtype:
        x = rng.integers(0, 10_000, shape, dtype=np.int32)
    else:
        x = rng.standard_normal(shape, dtype=np.float32)
    return x, rng.integers(0, model.output_shape[-1], rows, dtype=np.int32)


def main(argv):
    """Measures what the flags say."""
    del argv
    build, rows = ZOO[FLAGS.model]
    rows = FLAGS.batch_size or rows
    model = build()
    optimizer = keras.optimizers.SGD(0.01)
    if FLAGS.mode == "private":
        optimizer = keras_dp.DPSGD(
            0.01,
            l2_norm_clip=1.0,
            noise_multiplier=1.0,
            batch_size=rows,
            backend=FLAGS.backend,
            microbatch_size=FLAGS.microbatch_size or None,
        )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, jit_compile=FLAGS.jit_compile)
    batches = tf.data.Dataset.from_tensors(_data(model, rows)).repeat()
    clock = _Clock()
    model.fit(batches, steps_per_epoch=FLAGS.steps, verbose=0, callbacks=[clock])
    print(
        json.dumps(
            {
                "model": FLAGS.model,
                "mode": FLAGS.mode,
                "rows": rows,
                "step_s": statistics.median(clock.seconds[WARM_UP:]),
                "first_step_s": clock.seconds[0],
                "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    app.run(main)
