"""Streams, rewritten so that they can be read at random: a folder in the array_record format."""

import importlib
import itertools
import json
import pathlib

import keras
import numpy as np
import tensorflow as tf
from keras import tree

from keras_dp.sampling.draws import Process
from keras_dp.sampling.sources import RowSpec, Source, as_arrays, check_structure, specs_of

FORMAT = 1
_DESCRIPTION, _DATA = "examples.json", "examples.array_record"


def write_array_record(stream, folder, *, num_examples=None, verbose=1):
    """Rewrites a stream as a folder that can be read at random, for Poisson sampling.

        keras_dp.write_array_record(dataset, "train")
        source = keras_dp.ArrayRecordSource("train")
        sampler = keras_dp.PoissonSampler(source, batch_size=256)

    It reads the stream once and holds one example at a time in memory. The folder appears under
    its name when it is complete. It holds the examples as they are: protect it as the data.

    Args:
      stream: `tf.data.Dataset` of single examples, or anything that can be iterated over examples:
        arrays, or dicts and tuples of arrays and texts, all of one structure, shape and dtype
        (texts of any length).
      folder: path of a folder that does not exist yet.
      num_examples: int, how many there will be, if known: for the progress bar.
      verbose: 0 for silence, 1 for a progress bar.

    Returns:
      `ArrayRecordSource` of the folder.

    Raises:
      ImportError: the package array_record is missing.
      FileExistsError: `folder` exists.
      ValueError: no examples, or examples that differ in shape.
    """
    module = _array_record()
    folder = pathlib.Path(folder)
    unfinished = folder.with_name(folder.name + ".unfinished")
    if folder.exists():
        raise FileExistsError(f"{folder} exists. Choose another folder, or delete it first.")
    unfinished.mkdir(parents=True, exist_ok=True)
    if isinstance(stream, tf.data.Dataset):
        stream = stream.as_numpy_iterator()
    examples = map(as_arrays, stream)
    first = next(examples, None)
    if first is None:
        raise ValueError("The stream gave no examples: there is nothing to write.")
    layout = _Layout(specs_of(first, "example"))
    progress = keras.utils.Progbar(num_examples, verbose=verbose, unit_name="example")
    writer = module.ArrayRecordWriter(str(unfinished / _DATA), "group_size:1")
    count = 0
    for example in itertools.chain([first], examples):
        writer.write(layout.encode(example, count))
        count += 1
        if count % 1000 == 0:
            progress.update(count)
    writer.close()
    progress.update(count, finalize=True)
    description = {"format": FORMAT, "num_examples": count, "example": _to_json(layout.specs)}
    (unfinished / _DESCRIPTION).write_text(json.dumps(description, indent=2) + "\n")
    unfinished.rename(folder)
    return ArrayRecordSource(folder)


class ArrayRecordSource(Source):
    """A folder that `write_array_record` has written, as a data set for `PoissonSampler`.

    Args:
      folder: its path.

    Raises:
      ImportError: the package array_record is missing.
      FileNotFoundError, ValueError: it is no such folder.
    """

    def __init__(self, folder):
        _array_record()
        self._folder, self.name = pathlib.Path(folder), str(folder)
        try:
            description = json.loads((self._folder / _DESCRIPTION).read_text())
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{folder} holds no {_DESCRIPTION}: it was not written by "
                "keras_dp.write_array_record, or not completely."
            ) from error
        if description["format"] != FORMAT:
            raise ValueError(
                f"{folder} has format {description['format']}; this version reads {FORMAT}."
            )
        self.length, self.spec = description["num_examples"], _from_json(description["example"])
        self._layout, self._opened = _Layout(self.spec), None

    def __getitem__(self, index):
        """The example at one index."""
        arrays = [spec.zeros(1) for spec in tree.flatten(self.spec)]
        index = range(self.length)[index]
        self.read_into(np.array([index]), arrays, slice(0, 1))
        return tree.pack_sequence_as(self.spec, [array[0] for array in arrays])

    def read_into(self, indices, arrays, where):
        """As `Source.read_into`."""
        self._layout.decode(self._file().read(indices.tolist()), arrays, where)

    def _file(self):
        # Open files and their threads do not survive a fork.
        if self._opened is None or self._opened[0] is not Process.current:
            path = str(self._folder / _DATA)
            self._opened = (Process.current, _array_record().ArrayRecordReader(path))
        return self._opened[1]

    def __getstate__(self):
        return self.__dict__ | {"_opened": None}


class _Layout:
    """How an example is written: its numbers and the lengths of its texts, then the texts."""

    def __init__(self, specs):
        self.specs, self._columns = specs, tree.flatten(specs)
        fields = []
        for k, spec in enumerate(self._columns):
            dtype = np.dtype("<i8") if spec.is_text else spec.dtype
            fields.append((str(k), dtype, spec.shape))
        self._fixed = np.dtype(fields)

    def encode(self, example, number):
        check_structure(example, self.specs, f"example {number}")
        fixed, texts = np.zeros((), self._fixed), []
        for k, (spec, value) in enumerate(zip(self._columns, tree.flatten(example))):
            try:
                spec.check((1, *value.shape), value.dtype)
            except ValueError as error:
                raise ValueError(f"Example {number} is not like the first one: {error}") from error
            if spec.is_text:
                parts = [t.encode() if isinstance(t, str) else bytes(t) for t in value.flat]
                value = np.reshape([len(part) for part in parts], spec.shape)
                texts += parts
            fixed[str(k)] = value
        return b"".join([fixed.tobytes(), *texts])

    def decode(self, records, arrays, where):
        size = self._fixed.itemsize
        fixed = np.frombuffer(b"".join(record[:size] for record in records), self._fixed)
        texts = []
        for k, (spec, array) in enumerate(zip(self._columns, arrays)):
            values = fixed[str(k)]
            if spec.is_text:
                texts.append((values.reshape(len(records), -1), array))
            else:
                array[where] = values
        if texts:
            self._decode_texts(records, texts, where)

    def _decode_texts(self, records, texts, where):
        blocks = [np.empty(lengths.shape, object) for lengths, _ in texts]
        for row, record in enumerate(records):
            begin = self._fixed.itemsize
            for block, (lengths, _) in zip(blocks, texts):
                for column, length in enumerate(lengths[row].tolist()):
                    block[row, column] = record[begin : begin + length]
                    begin += length
        for block, (_, array) in zip(blocks, texts):
            array[where] = block.reshape(len(records), *array.shape[1:])


def _to_json(specs):
    if isinstance(specs, dict):
        return {"dict": {key: _to_json(value) for key, value in specs.items()}}
    if isinstance(specs, tuple):
        return {"tuple": [_to_json(value) for value in specs]}
    dtype = "text" if specs.is_text else specs.dtype.name
    return {"name": specs.name, "shape": list(specs.shape), "dtype": dtype}


def _from_json(node):
    if "dict" in node:
        return {key: _from_json(value) for key, value in node["dict"].items()}
    if "tuple" in node:
        return tuple(_from_json(value) for value in node["tuple"])
    dtype = object if node["dtype"] == "text" else tf.as_dtype(node["dtype"]).as_numpy_dtype
    return RowSpec(node["name"], tuple(node["shape"]), np.dtype(dtype))


def _array_record():
    try:
        return importlib.import_module("array_record.python.array_record_module")
    except ImportError as error:
        raise ImportError(
            "Folders that can be read at random need the package array_record: "
            "pip install array_record"
        ) from error
