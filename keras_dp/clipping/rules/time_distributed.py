"""TimeDistributed: its layer is called once, with the time steps as rows of a larger batch.

Keras calls the layer at one step after the other, which would be recorded as so many uses. A
layer that keeps examples apart gives the same on all steps of all examples at once; dropout
draws another mask of the same law.
"""

import tensorflow as tf

from keras_dp import _keras


def time_as_rows(recorder, layer, inputs, training=None, mask=None):
    """The call of a ``TimeDistributed`` layer while ``recorder`` is recording.

    Args:
      recorder: the :class:`~keras_dp.clipping.recording.Recorder`.
      layer: the ``TimeDistributed`` layer.
      inputs: ``[batch, time, ...]``.
      training: the training flag, or None.
      mask: ``[batch, time, ...]`` or None.

    Returns:
      The outputs of the layer inside, ``[batch, time, ...]``.
    """
    time = inputs.shape[1]
    if time is None:
        time = tf.shape(inputs)[1]
    given = _keras.accepted(
        layer.layer, training=training, mask=None if mask is None else _rows(mask)
    )
    with recorder.folded(time):
        outputs = recorder.run(layer.layer, _rows(inputs), **given)
    unfolded = tf.reshape(outputs, tf.concat([tf.shape(inputs)[:2], tf.shape(outputs)[1:]], 0))
    unfolded.set_shape([*inputs.shape[:2], *outputs.shape[1:]])
    return unfolded


def _rows(tensor):
    batch, time = tensor.shape[:2]
    rows = tf.reshape(tensor, tf.concat([[-1], tf.shape(tensor)[2:]], 0))
    rows.set_shape([None if None in (batch, time) else batch * time, *tensor.shape[2:]])
    return rows
