"""Times one way of training one model in Keras, in a process of its own; prints a line of JSON.

    python -m benchmarks.measure --model=cnn --mode=auto

Modes: plain Keras SGD, or keras_dp.DPSGD with one of its backends. ``model.fit`` runs on random
data that is in memory already. A step is timed from ``on_train_batch_begin`` to the moment the
loss can be read, the first one from the call of ``fit``. Peak memory is the process's largest
resident set.
"""

import keras
import tensorflow as tf
from absl import app

import keras_dp
from benchmarks import clock, fit

FLAGS = clock.FLAGS
MODES = ("plain", "auto", "layerwise", "vectorized", "loop")


def optimizer(batch_size):
    """The optimizer of the mode that the flags name."""
    if FLAGS.mode == "plain":
        return keras.optimizers.SGD(clock.LEARNING_RATE)
    return keras_dp.DPSGD(
        clock.LEARNING_RATE,
        l2_norm_clip=clock.L2_NORM_CLIP,
        noise_multiplier=clock.NOISE_MULTIPLIER,
        batch_size=batch_size,
        microbatch_size=FLAGS.microbatch_size,
        backend=FLAGS.mode,
    )


def _measure(entry, batch_size, step_clock):
    model = entry.build()
    fit.compile_classifier(model, optimizer(batch_size), jit_compile=FLAGS.jit_compile)
    batches = fit.repeated_batch(*entry.data(batch_size))
    fit.timed_fit(model, step_clock, batches, steps_per_epoch=step_clock.steps)
    versions = f"Keras {keras.__version__} on TensorFlow {tf.__version__}"
    if FLAGS.mode != "plain":
        versions = f"keras_dp {keras_dp.__version__}, {versions}"
    return model.count_params(), versions


def main(argv):
    """Measures what the flags say."""
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments: {' '.join(argv[1:])}")
    clock.report(_measure)


if __name__ == "__main__":
    clock.define_flags(MODES)
    app.run(main)
