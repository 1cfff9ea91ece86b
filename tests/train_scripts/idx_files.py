"""Writes small data sets in the IDX format of MNIST."""

import gzip
import struct

import numpy as np


def idx_bytes(array):
    array = np.asarray(array, np.uint8)
    header = b"\x00\x00\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_idx_folder(folder, train, test, separator="-", compressed=True):
    """train and test are pairs of images ``[n, height, width]`` and labels ``[n]``."""
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, (images, labels) in (("train", train), ("t10k", test)):
        for kind, axes, array in (("images", 3, images), ("labels", 1, labels)):
            name = f"{prefix}-{kind}{separator}idx{axes}-ubyte"
            content = idx_bytes(array)
            if compressed:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            else:
                (folder / name).write_bytes(content)


def digit_images(count, seed):
    """Public digits as bytes in 28x28 images: a problem that a pretrained network knows."""
    from train_scripts import data, distort

    digits, labels = data.load_digits()
    chosen = np.random.default_rng(seed).choice(len(digits), count, replace=False)
    return np.round(255 * distort.enlarge(digits[chosen])).astype(np.uint8), labels[chosen]
