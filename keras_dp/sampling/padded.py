"""Ragged rows, filled up to one shape."""

import numpy as np
import tensorflow as tf

from keras_dp.sampling.checks import checked_int
from keras_dp.sampling.sources import RowSpec, Source, is_text, unwrapped


class Padded(Source):
    """Rows of different lengths, filled up (and cut) to one length; for `PoissonSampler`.

        sampler = keras_dp.PoissonSampler(keras_dp.Padded(tokens, 128), labels, batch_size=256)

    The length is yours to give and not the longest row's: that would be a number found by looking
    at the private data, and one example more could change the shape of all the others.

    Args:
      rows: `tf.RaggedTensor`, a list of lists or arrays, or any object with `__len__` and a
        `__getitem__` that takes an int and gives an array `[length_of_the_row, ...]`. Axes after
        the first must not be ragged.
      length: int >= 1, of every row. Longer rows lose their end.
      value: number or text that stands behind shorter rows; 0 or "" by default.

    Raises:
      TypeError: rows that cannot be read by index, or are no arrays.
      ValueError: no rows, or a length below 1.
    """

    name = "Padded rows"

    def __init__(self, rows, length, value=None):
        self._size = checked_int(length, "length", 1)
        if isinstance(rows, tf.RaggedTensor):
            rows = _RaggedRows(rows)
        elif not isinstance(rows, (list, tuple)):
            rows = unwrapped(rows, "The argument of Padded")
        self._rows, self.length = rows, len(rows)
        if self.length == 0:
            raise ValueError("Padded holds no rows: there is nothing to sample from.")
        self._value = value
        first = np.asarray(rows[0])
        if first.ndim == 0:
            raise TypeError(
                "Padded needs rows that are arrays, such as lists of token numbers. "
                f"Received: {first!r} as the first row."
            )
        dtype = first.dtype
        if len(first) == 0:  # the dtype of an empty list says nothing
            dtype = next((np.asarray(row).dtype for row in rows if len(row)), dtype)
        dtype = np.dtype(object) if is_text(dtype) else dtype
        self.spec = RowSpec(self.name, (self._size, *first.shape[1:]), dtype)

    def read_into(self, indices, arrays, where):
        """As `Source.read_into`."""
        (array,) = arrays
        block = self.spec.zeros(len(indices))
        if self._value is not None:
            block[...] = self._value
        for line, index in zip(block, indices.tolist()):
            row = np.asarray(self._rows[index])[: self._size]
            if len(row):
                self.spec.check((1, self._size, *row.shape[1:]), row.dtype)
                line[: len(row)] = row
        array[where] = block


class _RaggedRows:
    """A `tf.RaggedTensor` as a sequence of NumPy arrays."""

    def __init__(self, tensor):
        if tensor.ragged_rank != 1:
            raise TypeError(
                "Padded fills up the first axis of the rows; this RaggedTensor has "
                f"{tensor.ragged_rank} ragged axes: {tensor.shape}."
            )
        self._splits, self._values = tensor.row_splits.numpy(), tensor.values.numpy()

    def __len__(self):
        return len(self._splits) - 1

    def __getitem__(self, index):
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._values[self._splits[index] : self._splits[index + 1]]
