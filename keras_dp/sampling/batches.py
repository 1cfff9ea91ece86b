"""Batches of a fixed size: rows of examples, then padding."""

import multiprocessing

import numpy as np
import tensorflow as tf
from keras import tree

from keras_dp.padding import PADDING_WEIGHT
from keras_dp.sampling.sources import RowSpec


class Batches:
    """Makes batches `(x, y, sample_weight)` of the examples at given indices.

    Args:
      examples: `Examples` or `MappedExamples`.
      class_weight: `ClassWeight`, or None.
    """

    def __init__(self, examples, class_weight=None):
        self._examples, self._class_weight = examples, class_weight
        self._flat = tree.flatten(examples.specs)
        self._weights_from = len(self._flat) - len(tree.flatten(examples.specs[2]))

    def gather(self, indices, size, draw, position=0):
        """A batch of `size` rows.

        Args:
          indices: int64 `[n]`, n <= size, the example of each row; -1 for padding. All rows
            after the n-th are padding.
          size: int, rows of the batch.
          draw: `Draw` of the batch.
          position: int, of the first row in the draw.

        Returns:
          Tuple of nests of arrays `[size, ...]`.
        """
        arrays = [None if spec is None else spec.zeros(size) for spec in self._flat]
        rows = np.flatnonzero(indices >= 0)
        if len(rows):
            where = slice(0, len(rows)) if len(rows) == len(indices) else rows
            self._read(indices, rows, where, arrays, draw, position)
        data, weights = arrays[: self._weights_from], arrays[self._weights_from :]
        factor = 1
        if self._class_weight is not None:
            factor = self._class_weight.factor(data[-1], rows)
        weights = [self._weight(array, rows, size, factor) for array in weights]
        batch = tree.pack_sequence_as(self._examples.specs, [*data, *weights])
        return tree.map_structure(_for_keras, batch)

    def tensor_spec(self, size):
        """The `tf.TensorSpec` of each array of a batch."""
        x, y, weight = self._examples.specs
        x, y = tree.map_structure(lambda spec: spec.tensor_spec(size), (x, y))
        weight = tree.map_structure(
            lambda spec: tf.TensorSpec((size, *(() if spec is None else spec.shape)), tf.float32),
            weight,
        )
        return x, y, weight

    def _read(self, indices, rows, where, arrays, draw, position):
        chosen = indices[rows]
        if np.all(chosen[1:] > chosen[:-1]):
            self._examples.read_into(chosen, arrays, where, draw, position)
            return
        # Files are read in rising order, wherever the rows then stand.
        order = np.argsort(chosen)
        self._examples.read_into(chosen[order], arrays, rows[order], draw, position)

    def _weight(self, weights, rows, size, factor):
        """Weights times `factor`, float32: -0.0 marks padding, and no example weighs -0.0."""
        weights = np.ones(size, np.float32) if weights is None else weights.astype(np.float32)
        batch = np.full_like(weights, PADDING_WEIGHT)
        factor = np.reshape(factor, (-1, *[1] * (weights.ndim - 1)))
        batch[rows] = weights[rows] * factor + np.float32(0)  # -0.0 + 0.0 is 0.0
        return batch


class ClassWeight:
    """A factor on the sample weight for each class."""

    def __init__(self, class_weight, spec):
        self._class_weight, self._one_hot = class_weight, spec.shape not in ((), (1,))

    def factor(self, targets, rows):
        """Float32 factors of these rows of the targets."""
        labels = targets[rows]
        if self._one_hot:
            labels = np.argmax(labels, axis=-1)
        classes, which = np.unique(np.round(labels.reshape(-1)), return_inverse=True)
        factors = [self._class_weight.get(int(label), 1.0) for label in classes]
        return np.array(factors, np.float32)[which]


def is_targets_of_one_output(spec):
    """Whether there are labels [N], [N, 1] or one-hot labels [N, classes]."""
    return isinstance(spec, RowSpec) and not spec.is_text and len(spec.shape) <= 1


def _for_keras(array):
    # Keras infers a batch's dtypes in the training process and refuses NumPy's text dtypes.
    if array.dtype == object and not _in_data_worker():
        return tf.constant(array, tf.string)
    return array


def _in_data_worker():
    """Whether Keras started this process to read batches: TensorFlow can hang in a forked one."""
    return multiprocessing.current_process().name.startswith("Keras_worker_")
