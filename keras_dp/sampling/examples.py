"""The examples of a data set: inputs, targets and weights, read by index, changed by a function."""

import concurrent.futures
import inspect
import os

import numpy as np
from keras import tree

from keras_dp.sampling.checks import checked_int
from keras_dp.sampling.draws import Draws, Process
from keras_dp.sampling.sources import as_arrays, as_source, specs_of, store


class Examples:
    """Inputs, targets and weights that stand at one index.

    Attributes:
      length: int, number of examples.
      specs: tuple `(x, y, sample_weight)` of nests of `RowSpec`. y is () if there is none, and
        None stands for weights of 1.
    """

    def __init__(self, x, y=None, sample_weight=None):
        x, weight = sources(x, "x"), sources(sample_weight, "sample_weight")
        y = () if y is None else sources(y, "y")
        self._sources = [leaf for leaf in tree.flatten((x, y, weight)) if leaf is not None]
        self.length = _common_length(self._sources)
        specs = tree.map_structure(lambda s: s if s is None else s.spec, (x, y, weight))
        if (
            isinstance(specs[0], tuple)
            and not tree.is_nested(x)
            and is_absent(y)
            and weight is None
        ):
            # A sequence of examples as Keras understands them: (x,), (x, y), (x, y, weight).
            specs = as_keras_example(specs[0])
        self.specs = specs
        self.has_targets = not is_absent(specs[1])
        check_weights(*specs[1:])

    def read_into(self, indices, arrays, where, draw=None, position=0):
        """Writes the examples at `indices` to `array[where]`.

        Args:
          indices: int64 `[n]`, distinct, rising, n >= 1.
          arrays: list with an array, or None for weights of 1, for each leaf of `specs`.
          where: slice or int array `[n]`, rows of the arrays.
          draw: `Draw`, which the function's random numbers belong to.
          position: int, of the first of these examples in the draw.
        """
        arrays = [array for array in arrays if array is not None]
        for source in self._sources:
            number = len(tree.flatten(source.spec))
            source.read_into(indices, arrays[:number], where)
            arrays = arrays[number:]


class MappedExamples:
    """Examples after a function, which runs in threads.

    Attributes: those of `Examples`.
    """

    def __init__(self, examples, function, workers=None):
        if not callable(function):
            raise TypeError(f"map_fn must be a function of one example. Received: {function!r}.")
        if workers is None:
            workers = min(os.cpu_count() or 1, 16)
        self._workers = checked_int(workers, "map_workers", 1)
        self._examples, self._function, self._pool = examples, function, None
        self._takes_rng = "rng" in inspect.signature(function).parameters
        self.length = examples.length
        # Random numbers that are never used again: the batches must not depend on this look.
        first = self._changed(self._raw(np.arange(1)), 0, Draws().next(0), 0)
        self.specs = tuple(
            part if part is None or is_absent(part) else specs_of(part, name)
            for part, name in zip(first, ("x", "y", "sample_weight"))
        )
        self.has_targets = not is_absent(self.specs[1])
        check_weights(*self.specs[1:])

    def read_into(self, indices, arrays, where, draw, position=0):
        """As `Examples.read_into`."""
        rows = np.arange(len(arrays[0]))[where]
        size = max(1, -(-len(indices) // (2 * self._workers)))
        starts = range(0, len(indices), size)

        def read(start):
            chunk = slice(start, start + size)
            raw = self._raw(indices[chunk])
            for k, row in enumerate(rows[chunk]):
                example = self._changed(raw, k, draw, position + start + k)
                store_parts(
                    example, self.specs, arrays, row, f"map_fn(example {indices[start + k]})"
                )

        if self._workers == 1 or len(starts) == 1:
            list(map(read, starts))
        else:
            list(self._threads().map(read, starts))

    def _raw(self, indices):
        specs = tree.flatten(self._examples.specs)
        arrays = [None if spec is None else spec.zeros(len(indices)) for spec in specs]
        self._examples.read_into(indices, arrays, slice(0, len(indices)))
        return tree.pack_sequence_as(self._examples.specs, arrays)

    def _changed(self, raw, k, draw, position):
        """What the function makes of the k-th example: `(x, y, sample_weight)`."""
        x, y, weight = tree.map_structure(lambda array: None if array is None else array[k], raw)
        arguments = [x]
        if self._examples.has_targets:
            arguments.append(y)
        if weight is not None:
            arguments.append(weight)
        named = {"rng": draw.example_generator(position)} if self._takes_rng else {}
        return as_keras_example(as_arrays(self._function(*arguments, **named)))

    def _threads(self):
        # Threads do not survive a fork.
        if self._pool is None or self._pool[0] is not Process.current:
            pool = concurrent.futures.ThreadPoolExecutor(self._workers, "keras_dp_map")
            self._pool = (Process.current, pool)
        return self._pool[1]

    def __getstate__(self):
        return self.__dict__ | {"_pool": None}


def sources(structure, name):
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


def store_parts(example, specs, arrays, row, name):
    """Writes x, y and weights of one example to a row of the arrays."""
    for part, spec in zip(example, specs):
        number = len(tree.flatten(spec))
        if part is not None or spec is not None:
            store(part, spec, arrays[:number], row, name)
        arrays = arrays[number:]


def _common_length(found):
    first = found[0]
    for source in found:
        if source.length != first.length:
            raise ValueError(
                "All arrays must have one row per example. Received: "
                f"{_name(first)} of length {first.length} and {_name(source)} of length "
                f"{source.length}."
            )
    return first.length


def _name(source):
    return tree.flatten(source.spec)[0].name
