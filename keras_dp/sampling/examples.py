"""The examples of a data set: inputs, targets and weights, read by index, changed by a function."""

import inspect
import itertools

import numpy as np
from keras import tree

from keras_dp.sampling.draws import Draws
from keras_dp.sampling.sources import ItemSource, as_arrays, as_source, specs_of, store
from keras_dp.sampling.threads import Threads


class DataSet:
    """Inputs, targets and weights that stand at one index, as they were given.

    Args:
      x, y, sample_weight: as `PoissonSampler` takes them.

    Attributes:
      length: int, number of examples.
    """

    def __init__(self, x, y=None, sample_weight=None):
        x, weight = _sources(x, "x"), _sources(sample_weight, "sample_weight")
        y = () if y is None else _sources(y, "y")
        self.sources = x, y, weight
        self.flat = tree.flatten(self.sources)
        self.length = _common_length([source for source in self.flat if source is not None])
        # A sequence of examples as Keras understands them: (x,), (x, y), (x, y, weight).
        self.is_sequence = not tree.is_nested(x) and is_absent(y) and weight is None

    def items(self, indices):
        """An iterator over `(x, y, sample_weight)`; () and None stand for no y and no weight."""
        columns = [
            itertools.repeat(None) if source is None else source.items(indices)
            for source in self.flat
        ]
        if self.is_sequence:
            return map(as_keras_example, columns[0])
        return (tree.pack_sequence_as(self.sources, parts) for parts in zip(*columns))


class Examples:
    """The examples of a data set as arrays of one shape and dtype.

    Args:
      data: `DataSet`.
      threads: int, threads that read from sources that give one example at a time; None if these
        may be asked by one thread only.

    Attributes:
      specs: tuple `(x, y, sample_weight)` of nests of `RowSpec`. y is () if there is none, and
        None stands for weights of 1.
    """

    def __init__(self, data, threads=None):
        self._sources = [source for source in data.flat if source is not None]
        one_by_one = any(isinstance(source, ItemSource) for source in self._sources)
        self._threads = Threads(threads if one_by_one and threads is not None else 1)
        specs = tree.map_structure(lambda s: s if s is None else s.spec, data.sources)
        self.specs = as_keras_example(specs[0]) if data.is_sequence else specs
        check_weights(*self.specs[1:])

    def read_into(self, indices, arrays, where, draw=None, position=0):
        """Writes the examples at `indices` to `array[where]`.

        Args:
          indices: int64 `[n]`, distinct, rising, n >= 1.
          arrays: list with an array, or None for weights of 1, for each leaf of `specs`.
          where: slice with a start or int array `[n]`, rows of the arrays.
          draw: `Draw`, which the function's random numbers belong to.
          position: int, of the first of these examples in the draw.
        """
        arrays = [array for array in arrays if array is not None]

        def read(chunk):
            begin = 0
            for source in self._sources:
                end = begin + len(tree.flatten(source.spec))
                source.read_into(indices[chunk], arrays[begin:end], _part(where, chunk))
                begin = end

        self._threads.run(read, len(indices))


class MappedExamples:
    """Examples after a function, which runs in threads.

    What the function gets need not be arrays of one shape; what it returns must be.

    Args:
      data: `DataSet`.
      function: as `PoissonSampler` takes it.
      threads: int, threads that read and run the function; None for the function alone.

    Attributes:
      specs: as those of `Examples`.
    """

    def __init__(self, data, function, threads=None):
        if not callable(function):
            raise TypeError(f"map_fn must be a function of one example. Received: {function!r}.")
        self._data, self._function = data, function
        self._threads, self._reads_in_threads = Threads(threads), threads is not None
        self._takes_rng = "rng" in inspect.signature(function).parameters
        # Random numbers that are never used again: the batches must not depend on this look.
        (first,) = data.items(np.arange(1))
        first = as_arrays(self._changed(first, Draws().next(0), 0))
        self.specs = tuple(
            part if part is None or is_absent(part) else specs_of(part, name)
            for part, name in zip(first, ("x", "y", "sample_weight"))
        )
        check_weights(*self.specs[1:])

    def read_into(self, indices, arrays, where, draw, position=0):
        """As `Examples.read_into`."""
        together = None if self._reads_in_threads else list(self._data.items(indices))
        rows = np.arange(len(arrays[0]))[where].tolist()
        arrays = tree.pack_sequence_as(self.specs, arrays)

        def read(chunk):
            numbers = range(chunk.start, chunk.stop)
            items = self._data.items(indices[chunk]) if together is None else together[chunk]
            for k, item in zip(numbers, items):
                example = self._changed(item, draw, position + k)
                store(example, self.specs, arrays, rows[k], f"map_fn(example {indices[k]})")

        self._threads.run(read, len(indices))

    def _changed(self, item, draw, position):
        """What the function makes of an example: `(x, y, sample_weight)`."""
        x, y, weight = item
        arguments = [x]
        if not is_absent(y):
            arguments.append(y)
        if weight is not None:
            arguments.append(weight)
        named = {"rng": draw.example_generator(position)} if self._takes_rng else {}
        return as_keras_example(self._function(*arguments, **named))


def _part(where, chunk):
    """The rows of a chunk of what goes to the rows `where`, a slice from its start or an array."""
    if isinstance(where, slice):
        return slice(where.start + chunk.start, where.start + chunk.stop)
    return where[chunk]


def _sources(structure, name):
    """The structure with a source for each array; tuples for lists, which tf.data would stack."""
    found = [
        None
        if leaf is None and name == "sample_weight"
        else as_source(leaf, "".join([name, *(f"[{key!r}]" for key in path)]))
        for path, leaf in tree.flatten_with_path(structure)
    ]
    if not found:
        raise ValueError(f"{name} holds no array. Received: {structure!r}.")
    return tree.lists_to_tuples(tree.pack_sequence_as(structure, found))


def as_keras_example(example):
    """`(x, y, sample_weight)` of what Keras takes for an example: x, (x,), (x, y), (x, y, w)."""
    if not isinstance(example, tuple):
        return example, (), None
    if not 1 <= len(example) <= 3:
        raise ValueError(
            "An example that is a tuple must be (x,), (x, y) or (x, y, sample_weight). "
            f"Received: {len(example)} parts. Inputs that belong together go into a dict."
        )
    return (*example, *((), None)[len(example) - 1 :])


def is_absent(targets):
    """Whether there are no targets, for which () stands."""
    return isinstance(targets, tuple) and not targets


def check_weights(y, weight):
    """Refuses weights that are no numbers, or not one for each output."""
    for spec in tree.flatten(weight):
        if spec is not None and spec.dtype.kind not in "biuf":
            raise TypeError(f"{spec.name} must hold numbers. Received: dtype {spec.dtype}.")
    if tree.is_nested(weight):
        try:
            tree.assert_same_structure(y, weight)
        except (ValueError, TypeError) as error:
            raise ValueError(
                "sample_weight must be one array, or have the structure of y with one array "
                "(or None) for each output. Received: "
                f"sample_weight={names(weight)} for y={names(y)}."
            ) from error


def names(specs):
    """The names of a nest of `RowSpec`, for errors."""
    return tree.map_structure(lambda spec: None if spec is None else spec.name, specs)


def _common_length(found):
    first = found[0]
    for source in found:
        if source.length != first.length:
            raise ValueError(
                "All arrays must have one row per example. Received: "
                f"{first.name} of length {first.length} and {source.name} of length "
                f"{source.length}."
            )
    return first.length
