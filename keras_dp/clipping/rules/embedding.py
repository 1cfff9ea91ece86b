"""Embedding: rows of a table."""

import tensorflow as tf

from keras_dp.clipping.forms import Rows
from keras_dp.clipping.rules.axes import flatten_positions


def embedding(use, g):
    """Embedding: z = table[ids]."""
    table = use.layer._embeddings
    if table.trainable:
        yield table, rows_read(use.input, g, table.shape)


def rows_read(ids, g, shape):
    """The form of a table ``[V, D]`` in z = table[ids], ids ``[batch, ...]``."""
    ids = table_ids(ids, shape[0])
    ids = tf.reshape(ids, [tf.shape(ids)[0], -1])
    if g.shape.rank == 2:
        g = g[:, None]
    g = flatten_positions(g, shape[1])
    ids.set_shape([g.shape[0], g.shape[1]])
    return Rows(ids, g, shape)


def table_ids(ids, size):
    """As int32 from 0 to size - 1: Keras counts negative ids from the table's end."""
    ids = tf.cast(ids, tf.int32)
    return tf.where(ids < 0, ids + size, ids)
