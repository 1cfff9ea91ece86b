"""Nested batches, row by row: structures that may hold None, masks, strings."""

import keras
import tensorflow as tf

from keras_dp import _keras


def flatten(structure):
    """The tensors of a nested structure without its Nones, and the way back."""
    flat = keras.tree.flatten(structure)
    present = [t is not None for t in flat]

    def rebuild(tensors):
        tensors = iter(tensors)
        return keras.tree.pack_sequence_as(
            structure, [next(tensors) if p else None for p in present]
        )

    return [t for t in flat if t is not None], rebuild


def to_tensors(structure):
    """The structure with arrays and numbers turned into tensors."""
    return keras.tree.map_structure(
        lambda t: t if t is None or _is_tensor(t) else tf.convert_to_tensor(t), structure
    )


def count(structure):
    """The number of rows, as an int where it is static, else as a tensor."""
    first = flatten(structure)[0][0]
    return first.shape[0] if first.shape[0] is not None else tf.shape(first)[0]


def take(structure, start, size):
    """``size`` rows from row ``start`` on; no copy where TensorFlow can share the memory."""

    def taken(tensor):
        if tensor is None or not isinstance(tensor, tf.Tensor):
            return None if tensor is None else tensor[start : start + size]
        # XLA has to know the size of every axis, which it cannot from two ends.
        others = [n or tf.shape(tensor)[k + 1] for k, n in enumerate(tensor.shape[1:])]
        rows = tf.slice(tensor, [start, *([0] * len(others))], tf.stack([size, *others]))
        rows.set_shape([size if isinstance(size, int) else None, *tensor.shape[1:]])
        return rows

    return keras.tree.map_structure(taken, structure)


def gather(structure, index):
    """The rows with the numbers ``index``, int32 ``[n]``."""
    return keras.tree.map_structure(lambda t: None if t is None else tf.gather(t, index), structure)


def select(structure, keep):
    """The rows where ``keep`` (bool ``[batch]``) is True; masks of Keras go along."""

    def chosen(tensor):
        if tensor is None:
            return None
        mask = _keras.get_mask(tensor)
        result = tf.boolean_mask(tensor, keep)
        return _keras.with_mask(result, None if mask is None else tf.boolean_mask(mask, keep))

    return keras.tree.map_structure(chosen, structure)


def single(structure):
    """A row as a batch of one."""
    return keras.tree.map_structure(lambda t: None if t is None else t[None], structure)


def _is_tensor(value):
    return tf.is_tensor(value) or isinstance(value, tf.RaggedTensor | tf.SparseTensor)
