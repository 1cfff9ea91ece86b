"""Classification data sets of TensorFlow Datasets, read at random or loaded whole.

Nothing is downloaded here. When data are missing, the error says which command prepares them.
"""

import functools
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf
from keras import tree

from train_scripts.errors import DataNotFoundError

# Where the held-out examples are, the first that there is and that has labels.
TEST_SPLITS = ("test", "validation")
HELD_OUT = ("train[:90%]", "train[90%:]")


class Classification(NamedTuple):
    """A data set for classification that can be read at any place in any order.

        data = tfds_data.open_tfds("mnist")
        sampler = keras_dp.PoissonSampler(data.train, batch_size=256, map_fn=data.to_pair)

    Attributes:
      name: str.
      class_names: list of str, one for each class.
      train, test: sequences of examples as TensorFlow Datasets gives them, read from disk and
        decoded when they are asked for, also by several threads.
      to_pair: function from such an example to ``(x, label)``: images become float32 in [0, 1],
        other inputs stay as they are; labels are int64.
    """

    name: str
    class_names: list
    train: Sequence
    test: Sequence
    to_pair: "ToPair"

    @property
    def num_classes(self):
        """Number of classes."""
        return len(self.class_names)


def open_tfds(name, image_size=None):
    """Opens a prepared data set for random access.

    Args:
      name: as ``tfds.builder`` takes it (``"mnist"``, ``"glue/sst2:2.0.0"``), looked for in the
        folder of the environment variable TFDS_DATA_DIR, or in ~/tensorflow_datasets. Or the
        folder of a prepared data set, the one with the file dataset_info.json.
      image_size: (height, width) to resize images to; needed where images have several sizes.

    Returns:
      Classification.

    Raises:
      DataNotFoundError: the package or the data are missing, or were prepared in a format that
        cannot be read at random; the message has the command.
      ValueError: the data set is not for classification.
    """
    builder = _builder(name)
    try:
        train, test = _splits(builder, builder.as_data_source)
    except NotImplementedError as error:
        raise DataNotFoundError(
            f"The data set {name!r} in {builder.data_dir} is stored as "
            f"{builder.info.file_format.value}, which cannot be read at random. Prepare it anew, "
            f"in another folder: {_command(name, '--data_dir=FOLDER')}, then set TFDS_DATA_DIR."
        ) from error
    to_pair = ToPair(builder.info, image_size)
    return Classification(builder.name, to_pair.class_names, train, test, to_pair)


def load_arrays(name, image_size=None):
    """Loads all images of a prepared data set, in any format.

    Args:
      name, image_size: as ``open_tfds`` takes them.

    Returns:
      Name, number of classes, ``(images, labels)`` to train on and to test on.

    Raises:
      DataNotFoundError: the package or the data are missing.
      ValueError: the data set is not for the classification of images.
    """
    builder = _builder(name)
    to_pair = ToPair(builder.info, image_size)
    if not to_pair.takes_images:
        raise ValueError(
            f"tfds:{name} has inputs {to_pair.input_feature}; images are needed here. Open it "
            "with train_scripts.tfds_data.open_tfds instead."
        )
    parts = []
    for examples in _splits(builder, functools.partial(_any_format, builder)):
        pairs = [to_pair(example) for example in examples]
        images, labels = zip(*pairs)
        parts.append((np.stack(images), np.stack(labels)))
    return builder.name, len(to_pair.class_names), *parts


class ToPair:
    """The input and the label of an example, for ``map_fn`` of ``keras_dp.PoissonSampler``.

    Args:
      info: ``tfds.core.DatasetInfo``.
      image_size: (height, width) or None.

    Raises:
      ValueError: no input and class label, or images of several sizes and no image_size.
    """

    def __init__(self, info, image_size=None):
        import tensorflow_datasets as tfds

        keys, features = info.supervised_keys, info.features
        label = features[keys[1]] if keys and isinstance(keys[1], str) else None
        if not isinstance(label, tfds.features.ClassLabel):
            raise ValueError(
                f"{info.name} is no data set for classification: its pair of input and label is "
                f"{keys}, its features are {sorted(features)}. One with a class label is needed."
            )
        self._input, self._label = keys[:2]
        self.class_names = label.names
        self.input_feature = tree.map_structure(lambda key: features[key], self._input)
        self.takes_images = isinstance(self.input_feature, tfds.features.Image)
        self._image_size = image_size
        if self.takes_images and image_size is None and None in self.input_feature.shape:
            raise ValueError(
                f"{info.name} has images of several sizes {self.input_feature.shape}: give the "
                "size that they shall be resized to, image_size=(height, width)."
            )

    def __call__(self, example):
        """``(x, label)`` of one example."""
        x = tree.map_structure(lambda key: example[key], self._input)
        if self.takes_images:
            x = _scaled(x)
            if self._image_size is not None:
                x = tf.image.resize(x, self._image_size, antialias=True).numpy()
        return x, np.int64(example[self._label])

    def image_and_label(self, example):
        """``(image as it is stored, int64 label)``, without a change of size or range."""
        return np.asarray(example[self._input]), np.int64(example[self._label])


def _scaled(image):
    image = np.asarray(image)
    if image.dtype.kind == "u":
        return image.astype(np.float32) / np.iinfo(image.dtype).max
    return image.astype(np.float32)


def _builder(name):
    if importlib.util.find_spec("tensorflow_datasets") is None:
        raise DataNotFoundError(
            f"--dataset=tfds:{name} needs the package tensorflow-datasets: "
            "pip install tensorflow-datasets importlib_resources"
        )
    import tensorflow_datasets as tfds

    folder = pathlib.Path(name).expanduser()
    if (folder / "dataset_info.json").is_file():
        return tfds.builder_from_directory(folder)
    try:
        builder = tfds.builder(name, data_dir=os.environ.get("TFDS_DATA_DIR"))
    except tfds.core.DatasetNotFoundError as error:
        raise DataNotFoundError(
            f"TensorFlow Datasets has no data set {name!r}, and there is no folder of that name "
            "with a file dataset_info.json."
        ) from error
    if not builder.is_prepared():
        raise DataNotFoundError(
            f"The data set {name!r} is not on this machine (looked in {builder.data_dir}). "
            f"Get it with: {_command(name)}"
        )
    return builder


def _any_format(builder, split):
    """An iterable over the examples: each format can be read in one of two ways."""
    try:
        return builder.as_data_source(split)
    except NotImplementedError:
        return builder.as_dataset(split=split).as_numpy_iterator()


def _command(name, *options):
    folder = os.environ.get("TFDS_DATA_DIR")
    if folder and not options:
        options = (f"--data_dir={folder}",)
    return " ".join(["tfds build", name, "--file_format=array_record", *options])


def _splits(builder, read):
    """What `read` makes of the examples to train on and of those to test on."""
    label = builder.info.supervised_keys[1] if builder.info.supervised_keys else None
    for split in TEST_SPLITS:
        if split in builder.info.splits:
            first = next(iter(read(f"{split}[:1]")))
            if not isinstance(label, str) or first[label] >= 0:  # -1 is a label kept secret
                return read("train"), read(split)
    return read(HELD_OUT[0]), read(HELD_OUT[1])
