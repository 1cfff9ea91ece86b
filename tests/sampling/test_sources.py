"""Whatever holds the examples, the sampler gives the same rows of them."""

import h5py
import keras
import numpy as np
import pandas as pd
import pyarrow
import pytest
import tensorflow as tf
from pyarrow import parquet

import keras_dp
from keras_dp.sampling import PoissonSampler
from tests.sampling.drawing import is_padding

N = 37
ROWS = np.arange(2 * N, dtype=np.float32).reshape(N, 2)


def real(batch):
    """The rows of a batch that hold examples."""
    x, y, weight = batch
    chosen = ~is_padding(weight)
    return keras.tree.map_structure(lambda a: np.asarray(a)[chosen], (x, y))


class Items:
    """Takes an int only, as most data sets do."""

    def __init__(self, make):
        self._make = make

    def __len__(self):
        return N

    def __getitem__(self, index):
        if not isinstance(index, int):
            raise NotImplementedError("one at a time")
        return self._make(index)


class ItemsAtOnce(Items):
    def __getitems__(self, indices):
        assert isinstance(indices, list) and all(type(i) is int for i in indices)
        return [self._make(index) for index in indices]


class Batches(keras.utils.PyDataset):
    def __init__(self, sizes, make=lambda i: (ROWS[i], i)):
        super().__init__()
        self._ends, self._make = np.cumsum([0, *sizes]), make

    def __len__(self):
        return len(self._ends) - 1

    def __getitem__(self, index):
        return self._make(np.arange(self._ends[index], self._ends[index + 1]))


def hdf5(folder):
    file = h5py.File(folder / "data.h5", "w")
    file["x"] = ROWS
    return file["x"]


def memory_map(folder):
    np.save(folder / "x.npy", ROWS)
    return np.load(folder / "x.npy", mmap_mode="r")


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: ROWS,
        lambda folder: ROWS[::-1][::-1],
        memory_map,
        hdf5,
        lambda folder: tf.constant(ROWS),
        lambda folder: pd.DataFrame(ROWS, index=np.arange(N) + 100),
        lambda folder: Items(lambda i: ROWS[i]),
        lambda folder: Items(lambda i: ROWS[i].tolist()),
        lambda folder: ItemsAtOnce(lambda i: ROWS[i]),
        lambda folder: keras_dp.Padded([row.tolist() for row in ROWS], 2),
    ],
    ids="array view memmap hdf5 tensor pandas items lists items-at-once padded".split(),
)
@pytest.mark.parametrize("grouped", [False, True])
def test_rows_of_every_kind_of_source(tmp_path, make, grouped):
    users = dict(users=np.arange(N) // 3, examples_per_user=2) if grouped else {}
    sampler = PoissonSampler(make(tmp_path), np.arange(N), batch_size=6, **users)
    seen = set()
    for _ in range(10):
        x, y = real(sampler[0])
        np.testing.assert_array_equal(x, ROWS[y])
        seen |= set(y.tolist())
    assert len(seen) > 20


@pytest.mark.parametrize("threads", [None, 4])
def test_a_sequence_of_whole_examples(threads):
    """As tfds.data_source, Grain and PyTorch give them: dicts and tuples, one at a time."""
    text = [f"text {i}" for i in range(N)]
    one = Items(lambda i: {"pixels": ROWS[i].astype(np.uint8), "text": text[i], "label": i})
    x, y = real(PoissonSampler(one, batch_size=20, threads=threads)[0])
    assert y == () and x["pixels"].dtype == np.uint8
    np.testing.assert_array_equal(x["pixels"], ROWS[x["label"]])
    assert x["text"].tolist() == [text[i].encode() for i in x["label"]]

    pairs = ItemsAtOnce(lambda i: ({"a": ROWS[i], "b": (np.float16(i),)}, i))
    x, y = real(PoissonSampler(pairs, batch_size=20, threads=threads)[0])
    np.testing.assert_array_equal(x["a"], ROWS[y])
    np.testing.assert_array_equal(x["b"][0], y)

    weighted = Items(lambda i: (ROWS[i], i, i / 2))
    x, y, weight = PoissonSampler(weighted, batch_size=N)[0]
    np.testing.assert_array_equal(weight, np.arange(N, dtype=np.float32) / 2)
    # With targets given beside it, a tuple is the input.
    x, y = real(PoissonSampler(Items(lambda i: (ROWS[i], i)), np.arange(N), batch_size=9)[0])
    np.testing.assert_array_equal(x[1], y)


def test_bytes_keep_their_zeros():
    sampler = PoissonSampler(Items(lambda i: b"\x00a\x00"), batch_size=N)
    assert sampler[0][0].numpy().tolist() == [b"\x00a\x00"] * N


def test_another_pydataset_is_read_example_by_example():
    x, y = real(PoissonSampler(Batches([10, 10, 10, 7]), batch_size=15)[0])
    np.testing.assert_array_equal(x, ROWS[y])
    sampler = PoissonSampler(Batches([10, 10, 10, 7]), batch_size=15)
    assert sampler.num_examples == N
    with pytest.raises(ValueError, match="batches of 10 examples.*batch 1 has 9"):
        PoissonSampler(Batches([10, 9, 10, 8]), batch_size=37)[0]
    with pytest.raises(ValueError, match="one row per example"):
        PoissonSampler(Batches([10, 9], lambda i: (ROWS[i], ROWS[:3])), batch_size=1)


def test_an_endless_pydataset_is_refused():
    class Endless(Batches):
        num_batches = None

    with pytest.raises(TypeError, match="endless.*number of examples"):
        PoissonSampler(Endless([5]), batch_size=1)


def test_columns_of_a_data_frame():
    frame = pd.DataFrame({"age": [20, 30, 40], "town": ["a", "b", "c"], "label": [0, 1, 2]})
    with pytest.raises(TypeError, match=r"x is a DataFrame.*several dtypes.*dict\(frame\)"):
        PoissonSampler(frame, batch_size=1)
    x, y = real(PoissonSampler(dict(frame[["age", "town"]]), frame["label"], batch_size=3)[0])
    assert x["age"].tolist() == [20, 30, 40] and x["town"].tolist() == [b"a", b"b", b"c"]
    assert y.tolist() == [0, 1, 2]


def test_columns_of_a_parquet_file(tmp_path):
    path = tmp_path / "data.parquet"
    columns = {"age": [20.0, 30.0, 40.0], "town": ["a", "b", "c"], "tokens": [[1], [2, 3], []]}
    parquet.write_table(pyarrow.table(columns), path)
    table = parquet.read_table(path)
    with pytest.raises(TypeError, match="pyarrow Table.*table.column_names"):
        PoissonSampler(table, batch_size=1)
    x = {"age": table["age"], "town": table["town"], "tokens": keras_dp.Padded(table["tokens"], 2)}
    x, _ = real(PoissonSampler(x, batch_size=3)[0])
    assert x["age"].tolist() == columns["age"] and x["town"].tolist() == [b"a", b"b", b"c"]
    assert x["tokens"].tolist() == [[1, 0], [2, 3], [0, 0]]


def test_grain_and_parquet_like_objects_without_an_array_index():
    """grain.MapDataset answers an array with an error, pyarrow's columns with one element."""

    class Column(Items):
        def __getitem__(self, index):
            return self._make(int(np.max(index)))

    x, y = real(PoissonSampler(Column(lambda i: ROWS[i]), np.arange(N), batch_size=20)[0])
    np.testing.assert_array_equal(x, ROWS[y])


@pytest.mark.parametrize(
    "stream",
    [
        tf.data.Dataset.range(5),
        iter(range(5)),
        (i for i in range(5)),
        lambda: iter(range(5)),
        keras_dp.FixedBatches(tf.data.Dataset.range(5), batch_size=2, num_examples=5),
        PoissonSampler(ROWS, batch_size=2),
    ],
    ids="dataset iterator generator function fixed sampler".split(),
)
def test_amplification_is_not_claimed_for_streams(stream):
    with pytest.raises(TypeError) as raised:
        PoissonSampler(stream, batch_size=1)
    for words in ("amplification", "write_array_record", "FixedBatches"):
        assert words in str(raised.value)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda i: ROWS[i] if i == 0 else ROWS[i, :1], r"one shape and dtype.*\(1,\).*Padded"),
        (lambda i: ROWS[i] if i == 0 else ROWS[i].astype(int), "int64"),
        (lambda i: {"a": i} if i == 0 else {"b": i}, r"one structure.*x\[1\]"),
        (lambda i: (i, i) if i == 0 else (i,), r"one structure.*x\[1\]"),
    ],
)
def test_examples_that_differ_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        PoissonSampler(Items(make), batch_size=N)[0]


def test_an_example_of_too_many_parts():
    with pytest.raises(ValueError, match="4 parts"):
        PoissonSampler(Items(lambda i: (i, i, i, i)), batch_size=1)


@pytest.mark.parametrize("kwargs", [dict(weights=ROWS), dict(sampling_probabilities=[0.5])])
def test_weighted_sampling_is_refused_with_what_to_do_instead(kwargs):
    with pytest.raises(TypeError, match="largest probability.*class_weight"):
        PoissonSampler(ROWS, batch_size=2, **kwargs)
    with pytest.raises(TypeError, match="no argument colour"):
        PoissonSampler(ROWS, batch_size=2, colour="red")


# Ragged rows.

TOKENS = [[1], [2, 3], [], [4, 5, 6, 7]]


@pytest.mark.parametrize(
    "rows",
    [
        TOKENS,
        tf.ragged.constant(TOKENS),
        np.array([np.array(row, np.int32) for row in TOKENS], object),
        pd.Series(TOKENS),
    ],
    ids="lists ragged objects pandas".split(),
)
def test_ragged_rows_are_filled_up_and_cut(rows):
    x, _, _ = PoissonSampler(keras_dp.Padded(rows, 3), batch_size=4)[0]
    assert x.dtype.kind == "i"
    assert x.tolist() == [[1, 0, 0], [2, 3, 0], [0, 0, 0], [4, 5, 6]]


def test_ragged_texts_and_another_value():
    words = keras_dp.Padded([["a"], ["b", "c"]], 2, "[PAD]")
    x, _, _ = PoissonSampler({"words": words}, batch_size=2)[0]
    assert x["words"].numpy().tolist() == [[b"a", b"[PAD]"], [b"b", b"c"]]


def test_ragged_rows_of_an_empty_first_row_take_the_dtype_of_the_others():
    x, _, _ = PoissonSampler(keras_dp.Padded([[], [1, 2]], 2, -1), batch_size=2)[0]
    assert x.dtype == np.int64 and x.tolist() == [[-1, -1], [1, 2]]


@pytest.mark.parametrize(
    "rows, length, error, words",
    [
        (TOKENS, 0, ValueError, "length"),
        ([], 3, ValueError, "no rows"),
        ([1, 2], 3, TypeError, "rows that are arrays"),
        (tf.ragged.constant([[[1], [2, 3]]]), 3, TypeError, "2 ragged axes"),
        ((i for i in TOKENS), 3, TypeError, "FixedBatches"),
    ],
)
def test_bad_ragged_rows(rows, length, error, words):
    with pytest.raises(error, match=words):
        keras_dp.Padded(rows, length)
