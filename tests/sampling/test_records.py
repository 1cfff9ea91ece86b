"""Streams rewritten as array_record folders, and read at random."""

import copy
import json
import multiprocessing
import pickle
import sys

import array_record  # noqa: F401  an optional package of the library, needed here
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import keras_dp
from keras_dp.sampling import PoissonSampler
from tests.sampling.drawing import is_padding

N = 200


def examples():
    for i in range(N):
        x = {
            "pixels": np.full((2, 3), i % 256, np.uint8),
            "half": ml_dtypes.bfloat16(i),
            "text": f"text {i} é",
            "words": np.array([b"a\x00" * (i % 3), b""], object),
        }
        yield x, (np.int64(i), i / 7)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records") / "train"
    keras_dp.write_array_record(examples(), folder, verbose=0)
    return folder


def test_every_example_comes_back(folder):
    source = keras_dp.ArrayRecordSource(folder)
    assert len(source) == N
    for i, (x, (number, fraction)) in enumerate(examples()):
        read_x, (read_number, read_fraction) = source[i]
        np.testing.assert_array_equal(read_x["pixels"], x["pixels"])
        assert read_x["pixels"].dtype == np.uint8 and read_x["half"] == x["half"]
        assert read_x["half"].dtype == ml_dtypes.bfloat16
        assert read_x["text"] == x["text"].encode()
        assert read_x["words"].tolist() == x["words"].tolist()
        assert read_number == number and read_fraction == fraction
    assert source[-1][1][0] == N - 1
    with pytest.raises(IndexError):
        source[N]


def test_poisson_batches_of_a_folder(folder):
    sampler = PoissonSampler(keras_dp.ArrayRecordSource(folder), batch_size=50)
    assert sampler.num_examples == N
    for _ in range(3):
        x, (number, fraction), weight = sampler[0]
        n = np.sum(~is_padding(weight))
        assert n > 0 and np.array_equal(fraction[:n], number[:n] / 7)
        assert np.array_equal(x["pixels"][:n, 0, 0], number[:n] % 256)
        assert x["text"].numpy()[:n].tolist() == [f"text {i} é".encode() for i in number[:n]]
        assert set(x["text"].numpy()[n:]) <= {b""} and not x["pixels"][n:].any()


def test_a_tf_dataset_is_rewritten(tmp_path):
    dataset = tf.data.Dataset.from_tensor_slices((np.arange(10.0), np.arange(10)))
    source = keras_dp.write_array_record(dataset, tmp_path / "a" / "b", verbose=0)
    x, y, _ = PoissonSampler(source, batch_size=10)[0]
    assert x.tolist() == y.tolist() == list(range(10))
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["b"]


def test_copies_and_other_processes_open_files_of_their_own(folder):
    source = keras_dp.ArrayRecordSource(folder)
    source[0]
    for copied in (copy.deepcopy(source), pickle.loads(pickle.dumps(source))):
        assert copied[7][1][0] == 7
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(int(source[9][1][0])))
    child.start()
    assert queue.get() == 9
    child.join()


def test_progress_is_shown(tmp_path, capsys):
    keras_dp.write_array_record(range(2500), tmp_path / "a", num_examples=2500)
    assert "2500/2500" in capsys.readouterr().out


def test_an_unfinished_folder_is_not_taken_for_a_whole_one(tmp_path):
    def breaks():
        yield 1
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="disk"):
        keras_dp.write_array_record(breaks(), tmp_path / "a", verbose=0)
    with pytest.raises(FileNotFoundError, match="not completely"):
        keras_dp.ArrayRecordSource(tmp_path / "a")
    keras_dp.write_array_record(range(3), tmp_path / "a", verbose=0)  # can be begun again
    assert keras_dp.ArrayRecordSource(tmp_path / "a")[2] == 2


@pytest.mark.parametrize(
    "stream, words",
    [
        ([], "no examples"),
        ([np.zeros(2), np.zeros(3)], "Example 1 is not like the first"),
        ([{"a": 1}, {"b": 1}], "one structure.*example 1"),
        ([np.float32(1), np.float64(1)], "Example 1.*float64"),
    ],
)
def test_bad_streams(tmp_path, stream, words):
    with pytest.raises(ValueError, match=words):
        keras_dp.write_array_record(stream, tmp_path / "a", verbose=0)


def test_bad_folders(tmp_path, folder):
    with pytest.raises(FileExistsError, match="exists"):
        keras_dp.write_array_record([1], folder, verbose=0)
    (tmp_path / "examples.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        keras_dp.ArrayRecordSource(tmp_path)


def test_a_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "array_record.python.array_record_module", None)
    for use in (
        lambda: keras_dp.ArrayRecordSource(tmp_path),
        lambda: keras_dp.write_array_record([1], tmp_path / "a"),
    ):
        with pytest.raises(ImportError, match="pip install array_record"):
            use()
