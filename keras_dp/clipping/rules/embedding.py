"""Embedding: rows of a table."""

import tensorflow as tf

from keras_dp.clipping.forms import Rows
from keras_dp.clipping.rules.axes import flatten_positions


def embedding(use, g):
    """Embedding: z = table[ids]; Keras counts negative ids from the table's end."""
    table = use.layer._embeddings
    ids = tf.cast(use.input, tf.int32)
    ids = tf.where(ids < 0, ids + table.shape[0], ids)
    ids = tf.reshape(ids, [tf.shape(ids)[0], -1])
    if g.shape.rank == 2:
        g = g[:, None]
    g = flatten_positions(g, table.shape[1])
    ids.set_shape([g.shape[0], g.shape[1]])
    yield table, Rows(ids, g, table.shape)
