"""Sources: examples that can be read at any place in any order, whatever holds them.

`as_source` finds out how an object gives its rows and puts one face on all of them: a length, the
shape and dtype of a row, and `read_into`, which copies the rows at some indices into the arrays
of a batch.
"""

import abc
import dataclasses
import functools
from collections.abc import Iterator, Mapping

import keras
import numpy as np
import tensorflow as tf
from keras import tree

STREAM = (
    "Poisson sampling needs examples that can be read at any place in any order: amplification by "
    "sampling is only proved for batches that draw each example independently. Pass NumPy arrays, "
    "memory maps, tensors, pandas data or any object with __len__ and __getitem__ (HDF5, "
    "tfds.data_source, Grain sources, another PyDataset), or dicts, lists and tuples of them. A "
    "stream can be rewritten once, with keras_dp.write_array_record(stream, folder), and then be "
    "read by keras_dp.ArrayRecordSource(folder). To train on the stream itself, give `fit` "
    "keras_dp.FixedBatches(stream, batch_size=..., num_examples=...): shuffled, fixed "
    'batches (sampling="shuffle"), for which EpsilonLogger claims no amplification.'
)


@dataclasses.dataclass(frozen=True)
class RowSpec:
    """Name, shape and dtype of the rows of one array; dtype object stands for text."""

    name: str
    shape: tuple
    dtype: np.dtype

    @property
    def is_text(self):
        """Whether the rows are texts."""
        return self.dtype == object

    def zeros(self, size):
        """`size` rows of zeros or empty strings."""
        rows = np.zeros((size, *self.shape), self.dtype)
        if self.is_text:
            rows[...] = b""
        return rows

    def tensor_spec(self, size):
        """The `tf.TensorSpec` of `size` rows."""
        dtype = tf.string if self.is_text else tf.as_dtype(self.dtype)
        return tf.TensorSpec((size, *self.shape), dtype)

    def check(self, shape, dtype):
        """Refuses rows `[n, ...]` that are not like the first one."""
        same = shape[1:] == self.shape and (is_text(dtype) if self.is_text else dtype == self.dtype)
        if not same:
            raise ValueError(
                f"{self.name} must give rows of one shape and dtype. Received: shape {shape[1:]} "
                f"and dtype {dtype}, the first row had {self.shape} and "
                f"{'text' if self.is_text else self.dtype}. Ragged rows can be filled up: "
                "keras_dp.Padded(rows, length)."
            )


def is_text(dtype):
    """Whether values of this NumPy dtype are texts."""
    return dtype.kind in "OUST"


class Source(abc.ABC):
    """Examples by index.

    Attributes:
      name: str, what errors call it.
      length: int, number of examples.
      spec: nest of `RowSpec`, one for each array that an example has. An error if examples are no
        arrays of one shape and dtype; `items` may give them all the same.
    """

    name: str
    length: int

    def __len__(self):
        return self.length

    @abc.abstractmethod
    def read_into(self, indices, arrays, where):
        """Writes the rows at `indices` to `array[where]` of each array.

        Args:
          indices: int64 `[n]`, distinct, rising, n >= 1.
          arrays: list with an array for each leaf of `spec`, in the order of `tree.flatten`.
          where: slice or int array `[n]`, rows of the arrays.
        """

    def items(self, indices):
        """The examples at `indices`, one after the other, as they are."""
        specs = tree.flatten(self.spec)
        arrays = [spec.zeros(len(indices)) for spec in specs]
        self.read_into(indices, arrays, slice(0, len(indices)))
        return [tree.pack_sequence_as(self.spec, rows) for rows in zip(*arrays)]


class ArraySource(Source):
    """An array, or what takes an int array as an index like one: memory maps, HDF5, zarr."""

    def __init__(self, array, name, first_rows):
        self._array, self.length = array, len(array)
        self._first_rows, self.name = first_rows, name

    @functools.cached_property
    def spec(self):
        """A `RowSpec`."""
        return _spec(self._first_rows, self._first_rows.shape[1:], self.name)

    def items(self, indices):
        """As `Source.items`."""
        return np.asarray(self._array[indices])

    def read_into(self, indices, arrays, where):
        """As `Source.read_into`."""
        (array,) = arrays
        plain = type(self._array) in (np.ndarray, np.memmap) and self._array.dtype == array.dtype
        if plain and isinstance(where, slice):  # without a copy on the way
            np.take(self._array, indices, axis=0, out=array[where], mode="clip")
            return
        rows = np.asarray(self._array[indices])
        if len(rows) != len(indices):
            raise ValueError(
                f"{self.spec.name} must give rows of one shape and dtype. Received: an array of "
                f"shape {rows.shape} for {len(indices)} indices."
            )
        self.spec.check(rows.shape, rows.dtype)
        array[where] = rows


class ItemSource(Source):
    """What gives one example for an int, of one array or of a dict or tuple of arrays.

    `__getitems__`, where there is one, reads several at once (TensorFlow Datasets, PyTorch).
    """

    def __init__(self, items, name, first):
        self._items, self.length = items, len(items)
        self._first, self.name = first, name

    @functools.cached_property
    def spec(self):
        """A nest of `RowSpec`, as the first example has it."""
        return specs_of(as_arrays(self._first), self.name)

    def items(self, indices):
        """As `Source.items`."""
        indices = indices.tolist()
        if hasattr(self._items, "__getitems__"):
            return self._items.__getitems__(indices)
        return (self._items[index] for index in indices)

    def read_into(self, indices, arrays, where):
        """As `Source.read_into`."""
        rows = range(*where.indices(len(arrays[0]))) if isinstance(where, slice) else where
        arrays = tree.pack_sequence_as(self.spec, arrays)
        for row, index, example in zip(rows, indices.tolist(), self.items(indices)):
            store(example, self.spec, arrays, row, f"{self.name}[{index}]")


class BatchSource(Source):
    """The examples of another PyDataset, which gives them in batches of one size.

    To read one of its examples is to read its batch.
    """

    def __init__(self, batches, name):
        if batches.num_batches is None:
            raise TypeError(
                f"{name} of type {type(batches).__name__} is endless (num_batches is None), so "
                "the number of examples to draw from is unknown. Give it a length."
            )
        self._batches, self.name = batches, name
        first = as_arrays(batches[0])
        self._rows = self._length_of(first, 0)
        last = batches.num_batches - 1
        self.length = last * self._rows + self._length_of(as_arrays(batches[last]), last)
        self.spec = specs_of(tree.map_structure(lambda array: array[0], first), name)
        self._columns = tree.flatten(self.spec)

    def read_into(self, indices, arrays, where):
        """As `Source.read_into`."""
        rows = np.arange(len(arrays[0]))[where]
        batches = indices // self._rows
        for batch in np.unique(batches):
            chosen = batches == batch
            example = as_arrays(self._batches[int(batch)])
            tree.assert_same_structure(self.spec, example)
            for spec, target, array in zip(self._columns, arrays, tree.flatten(example)):
                spec.check(array.shape, array.dtype)
                within = indices[chosen] - batch * self._rows
                if within[-1] >= len(array):
                    raise ValueError(
                        f"{self.name} must give batches of {self._rows} examples, as its first "
                        f"one, but batch {batch} has {len(array)}. Only the last may be smaller."
                    )
                target[rows[chosen]] = array[within]

    def _length_of(self, batch, number):
        lengths = {array.shape[:1] for array in tree.flatten(batch)}
        if len(lengths) != 1 or lengths == {()}:
            raise ValueError(
                f"Batch {number} of {self.name} must have arrays with one row per example. "
                f"Received: shapes {[array.shape for array in tree.flatten(batch)]}."
            )
        return lengths.pop()[0]


def as_source(given, name):
    """Finds out how `given` can be read.

    Args:
      given: array, sequence of examples, or anything else with a length and an index.
      name: what errors call it.

    Returns:
      Source.

    Raises:
      TypeError: streams, and whatever else has no length or no index.
      ValueError: no examples.
    """
    if isinstance(given, Source):
        source = given
    else:
        given = unwrapped(given, name)
        if _length(given, name) == 0:
            raise ValueError(
                f"{name} holds no examples (length 0). Pass at least one example: there is "
                "nothing to sample from."
            )
        source = _probed(given, name)
    return source


def unwrapped(given, name):
    """`given`, or the NumPy array it stands for; streams are refused."""
    kind = type(given).__name__
    if isinstance(given, (tf.RaggedTensor, tf.SparseTensor)) or hasattr(given, "tocoo"):
        raise TypeError(
            f"{name} of type {kind} is ragged or sparse; rows of one shape are needed. Fill "
            "ragged rows up with keras_dp.Padded(rows, length), or convert to a dense array."
        )
    if isinstance(given, (tf.Tensor, tf.Variable)):
        return given.numpy()
    if hasattr(given, "iloc"):  # pandas indexes by label, not by position
        return _of_pandas(given, name)
    if type(given).__module__.split(".")[0] == "pyarrow":  # its elements are no numbers
        return _of_arrow(given, name)
    if isinstance(given, (str, bytes)):
        raise TypeError(
            f"{name} is one text, not a data set that can be read at any place. "
            "Pass an array of texts."
        )
    is_stream = isinstance(given, (tf.data.Dataset, Iterator)) or hasattr(given, "sampling")
    if is_stream or not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise TypeError(f"{name} of type {kind} gives no examples by index. {STREAM}")
    return given


def _of_pandas(frame, name):
    array = frame.to_numpy()
    kinds = {dtype.kind for dtype in getattr(frame, "dtypes", [])} if array.ndim == 2 else set()
    if array.dtype == object and len(kinds) > 1:
        raise TypeError(
            f"{name} is a {type(frame).__name__} whose columns have several dtypes, which one "
            "array cannot keep. Pass dict(frame): an input of the model for each column."
        )
    return array


def _of_arrow(column, name):
    if hasattr(column, "column_names"):
        raise TypeError(
            f"{name} is a pyarrow {type(column).__name__} of several columns. Pass "
            "{name: table[name] for name in table.column_names}: an input for each column."
        )
    return column.to_pandas().to_numpy()


def _length(given, name):
    try:
        return len(given)
    except TypeError as error:
        raise TypeError(
            f"{name} has no length ({error}). Pass an array with one row per example."
        ) from error


def _probed(given, name):
    """The kind of source that `given` is, by trying it on its first rows."""
    if isinstance(given, keras.utils.PyDataset):
        return BatchSource(given, name)
    if hasattr(given, "__getitems__"):
        return ItemSource(given, name, given[0])
    if isinstance(given, np.ndarray):
        return ArraySource(given, name, given[:1])
    indices = np.arange(min(2, len(given)))
    rows, no_rows = _attempt(lambda: np.asarray(given[indices]))
    first, no_first = _attempt(lambda: as_arrays(given[0]))
    if no_rows and no_first:
        raise TypeError(
            f"{name} of type {type(given).__name__} can be read neither with an integer array "
            f"({type(no_rows).__name__}: {no_rows}) nor with an int ({type(no_first).__name__}: "
            f"{no_first}), as a NumPy array can (source[np.array([5, 8])], source[5]). "
            "Give it such a __getitem__."
        ) from no_first
    by_array = not no_rows and rows.shape[:1] == indices.shape
    if by_array and not no_first:  # what answers an int array with one example is no array
        by_array = not tree.is_nested(first) and rows.shape[1:] == first.shape
    if by_array:
        return ArraySource(given, name, rows)
    if no_first:
        raise ValueError(
            f"{name}[np.array([0, 1])] must be two rows, of shape (2, ...). "
            f"Received: shape {rows.shape}."
        )
    return ItemSource(given, name, first)


def _attempt(read):
    """What `read` returns, and what it raised: a source may raise anything for a wrong index."""
    try:
        return read(), None
    except Exception as error:
        return None, error


def as_arrays(example):
    """An example as a nest of dicts and tuples of arrays; a list stands for an array."""
    if isinstance(example, Mapping):
        return {key: as_arrays(value) for key, value in example.items()}
    if isinstance(example, tuple):
        return tuple(as_arrays(value) for value in example)
    return None if example is None else _as_array(example)


def _as_array(value):
    if isinstance(value, (str, bytes)):  # NumPy's own text dtypes cut zero bytes off
        return np.array(value, object)
    return np.asarray(value)


def specs_of(example, name):
    """The `RowSpec` of each array of an example."""
    specs = [
        None
        if leaf is None
        else _spec(leaf, leaf.shape, "".join([name, *(f"[{key!r}]" for key in path)]))
        for path, leaf in tree.flatten_with_path(example)
    ]
    if not specs:
        raise ValueError(f"{name} holds no array. Received: {example!r}.")
    return tree.pack_sequence_as(example, specs)


def _spec(values, shape, name):
    if values.dtype == object and not all(isinstance(v, (str, bytes)) for v in values.flat):
        raise TypeError(
            f"{name} has dtype object and its values are not text. Rows must all have one shape "
            "and one dtype: fill ragged rows up with keras_dp.Padded(rows, length), and convert "
            "with numpy.asarray."
        )
    return RowSpec(name, shape, np.dtype(object) if is_text(values.dtype) else values.dtype)


def store(example, specs, arrays, row, name):
    """Writes an example to a row of arrays, which are a nest like `specs`; None has no array."""
    if isinstance(specs, RowSpec) and _keys(example) is None:
        value = _as_array(example)
        specs.check((1, *value.shape), value.dtype)
        arrays[row] = value[()] if specs.is_text and value.ndim == 0 else value
    elif _keys(example) == _keys(specs) and (specs is not None or example is None):
        for key in _keys(specs) or ():
            store(example[key], specs[key], arrays[key], row, name)
    else:
        raise _other_structure(as_arrays(example), specs, name)


def _keys(nest):
    """What the parts of a nest are called; None for an array."""
    if isinstance(nest, Mapping):
        return set(nest)
    return range(len(nest)) if isinstance(nest, tuple) else None


def check_structure(example, specs, name):
    """Refuses an example that does not have the arrays of `specs`."""
    try:
        tree.assert_same_structure(specs, example)
    except (ValueError, TypeError) as error:
        raise _other_structure(example, specs, name) from error


def _other_structure(example, specs, name):
    shapes = tree.map_structure(lambda a: a if a is None else f"array of shape {a.shape}", example)
    return ValueError(
        f"All examples must have one structure. Received: {name} = {shapes}, the first example "
        f"had {tree.map_structure(lambda s: s if s is None else s.name, specs)}."
    )
