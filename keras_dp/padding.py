"""Padding rows: how a batch of fixed size carries fewer examples than it has rows.

A Poisson draw has no fixed size, so the sampler fills the batch up with rows that
are no examples. Such a row carries the sample weight -0.0. For arithmetic that is a
weight of zero, harmless wherever the batch ends up (``evaluate``, other libraries);
its sign bit tells the private step that there is no example in the row, so that it
counts in no gradient, no loss and no metric. A row to which a user gave the weight
0.0 stays an example: its gradient is zero, and metrics count it as Keras does.
"""

import numpy as np
import tensorflow as tf

PADDING_WEIGHT = np.float32(-0.0)


def real_rows(sample_weight):
    """Which rows hold an example.

    Args:
      sample_weight: float tensor ``[batch, ...]``, or a nest of them (one per output).

    Returns:
      bool tensor ``[batch]``: False where every weight of the row is -0.0.
    """
    real = None
    for weight in tf.nest.flatten(sample_weight):
        if weight is None:
            continue
        weight = tf.cast(weight, tf.float32)
        padding = tf.bitcast(weight, tf.int32) == np.int32(-(2**31))
        padding = tf.reduce_all(tf.reshape(padding, [tf.shape(padding)[0], -1]), axis=1)
        real = ~padding if real is None else real | ~padding
    return real
