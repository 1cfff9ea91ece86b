"""Does row i of what is recorded belong to example i, in every layer?

A model can keep its examples apart and still call a layer on rows that are not the
examples: on [batch x time, features], on [time, batch, features], on the batch in another
order, on positions that belong to no example. The norms of such rows would be put together
wrongly. The shapes do not always tell (time may be as long as the batch), so the trial run
of ``keras_dp.independence`` does: it looks at every recorded output and its gradient, and
not only at the outputs of the model.
"""

import numpy as np
import tensorflow as tf

from keras_dp import independence
from keras_dp.clipping.recording import Recorder


def rows_are_examples(model, variables, input_spec):
    """Tells by a trial run whether recorded rows and outputs belong to one example each.

    Args:
      model: the model.
      variables: its trainable variables.
      input_spec: nest of objects with ``shape`` and ``dtype``, what the model is called on.

    Returns:
      True when they do. False when a row of an output, of a recorded layer or of its
      gradient depends on another example, when the number of rows is not that of the
      examples, or when a recorded layer does not depend on the examples at all. None when
      the trial run cannot tell.
    """
    other_sizes, seen = [], []

    def run(model, batch):
        recorder = Recorder(model, variables)
        with tf.GradientTape(watch_accessed_variables=False) as tape, recorder.recording(tape):
            outputs = model(batch, training=True)
            total = tf.add_n([_projection(o) for o in tf.nest.flatten(outputs)])
        size = tf.nest.flatten(batch)[0].shape[0]
        recorded = [output for use in recorder.uses for output in use.outputs]
        other_sizes.extend(r for r in recorded if r.shape[0] != size)
        gradients = [
            tf.zeros_like(r) if g is None else tf.convert_to_tensor(g)
            for r, g in zip(recorded, tape.gradient(total, recorded))
        ]
        seen.append([r.numpy() for r in recorded])
        return [outputs, recorded, gradients]

    coupled = independence.couples_examples(model, input_spec=input_spec, run=run)
    if other_sizes or (seen and _constant(seen)):
        return False
    return None if coupled is None else not coupled


def _projection(output):
    """A number that depends on every entry of a floating-point output, each in its own way."""
    if not output.dtype.is_floating:
        return tf.constant(0.0)
    one_row = output.shape[1:]
    weights = np.cos(np.arange(one_row.num_elements())).reshape(one_row).astype("float32")
    # Not linear, so that a row of the gradient depends on that row of the output.
    return tf.reduce_sum(weights * tf.sin(tf.cast(output, tf.float32)))


def _constant(seen):
    """Whether some recorded output was the same in all runs, whatever the examples were."""
    return any(
        all(np.array_equal(values, others[0]) for values in others[1:]) for others in zip(*seen)
    )
