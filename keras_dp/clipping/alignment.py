"""Does row i of what is recorded belong to example i, in every layer?

A model can keep its examples apart and still call a layer on rows that are not the
examples: on [batch x time, features], on [time, batch, features], on the batch in another
order. The norms of such rows would be put together wrongly. The shapes do not always tell
(time may be as long as the batch), so the trial run of ``keras_dp.independence`` does: it
looks at every recorded output and not only at those of the model.
"""

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
      True when they do, False when a row of an output or of a recorded layer depends on
      another example or the number of rows is not that of the examples, None when the trial
      run cannot tell.
    """
    other_sizes = []

    def run(model, batch):
        recorder = Recorder(model, variables)
        with tf.GradientTape(watch_accessed_variables=False) as tape, recorder.recording(tape):
            outputs = model(batch, training=True)
        size = tf.nest.flatten(batch)[0].shape[0]
        recorded = [output for use in recorder.uses for output in use.outputs]
        other_sizes.extend(r for r in recorded if r.shape[0] != size)
        return [outputs, recorded]

    coupled = independence.couples_examples(model, input_spec=input_spec, run=run)
    if other_sizes:
        return False
    return None if coupled is None else not coupled
