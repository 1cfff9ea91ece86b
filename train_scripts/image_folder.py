"""Folders of image files, one folder for each class, read at random."""

import os
import pathlib

import numpy as np
import tensorflow as tf

from train_scripts.errors import DataNotFoundError
from train_scripts.tfds_data import TEST_SPLITS, Classification

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".gif")
TEST_FOLDERS = (*TEST_SPLITS, "val", "eval")


def open_image_folder(folder, image_size=None):
    """Opens a folder of images for random access.

        PATH/train/CLASS/*.jpg        to train on
        PATH/test/CLASS/*.jpg         to test on; "validation", "val" or "eval" will do too

    Files are found by name (.jpg, .jpeg, .png, .bmp, .gif) at any depth below the class's folder,
    and read when they are asked for. Classes are numbered in the order of their names.

    Args:
      folder: path.
      image_size: (height, width) to resize images to; needed where images have several sizes.

    Returns:
      ``train_scripts.tfds_data.Classification``.

    Raises:
      DataNotFoundError: no such folder, or no images in one of the two.
      ValueError: a class of test images that is not among those to train on.
    """
    folder = pathlib.Path(folder).expanduser()
    tests = [folder / name for name in TEST_FOLDERS if (folder / name).is_dir()]
    if not (folder / "train").is_dir() or not tests:
        raise DataNotFoundError(
            f"{folder} must have the folders train and one of {', '.join(TEST_FOLDERS)}, each with "
            "a folder of images for every class."
        )
    class_names = _class_names(folder / "train")
    unknown = sorted(set(_class_names(tests[0])) - set(class_names))
    if unknown:
        raise ValueError(
            f"{tests[0]} has the class {unknown[0]!r}, which {folder / 'train'} has not. Both need "
            "the same folders."
        )
    train, test = (ImageFiles(part, class_names) for part in (folder / "train", tests[0]))
    return Classification(folder.name, class_names, train, test, ToPair(image_size))


class ImageFiles:
    """The image files below a folder: a sequence of dicts with a path and a label.

    Args:
      folder: path, with a folder for each class.
      class_names: list of str; the label is the place in it.

    Raises:
      DataNotFoundError: no images.
    """

    def __init__(self, folder, class_names):
        self._files = []
        for label, name in enumerate(class_names):
            if (folder / name).is_dir():
                self._files += [(path, label) for path in _images(folder / name)]
        if not self._files:
            raise DataNotFoundError(
                f"There are no images below {folder}: files whose names end with "
                f"{', '.join(ENDINGS)} are looked for."
            )

    def __len__(self):
        return len(self._files)

    def __getitem__(self, index):
        path, label = self._files[index]
        return {"path": path, "label": np.int64(label)}


class ToPair:
    """The image and the label of an example, for ``map_fn`` of ``keras_dp.PoissonSampler``.

    Args:
      image_size: (height, width) to resize to, or None.
    """

    takes_images = True

    def __init__(self, image_size=None):
        self._image_size = image_size

    def __call__(self, example):
        """``(float32 image in [0, 1], int64 label)`` of one example."""
        image, label = self.image_and_label(example)
        image = image.astype(np.float32) / 255
        if self._image_size is not None:
            image = tf.image.resize(image, self._image_size, antialias=True).numpy()
        return image, label

    def image_and_label(self, example):
        """``(uint8 image [height, width, 3] of the file's size, int64 label)``."""
        path = example["path"]
        try:
            image = tf.io.decode_image(tf.io.read_file(path), channels=3, expand_animations=False)
        except tf.errors.OpError as error:
            raise ValueError(f"{path} cannot be read as an image: {error.message}") from error
        return image.numpy(), np.int64(example["label"])


def _class_names(folder):
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir())


def _images(folder):
    found = [
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(ENDINGS)
    ]
    return sorted(found)
