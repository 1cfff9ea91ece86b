"""TensorFlow Datasets, with builders that the tests write and prepare on disk."""

import importlib.util

import importlib_resources  # noqa: F401  tensorflow_datasets needs it to prepare data
import keras
import numpy as np
import pytest
import tensorflow_datasets as tfds

import keras_dp
from tests.sampling.drawing import is_padding
from train_scripts import crops, data, imagenet, tfds_data

TRAIN, TEST = 40, 7


class _Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    VERSION = tfds.core.Version("1.0.0")
    SPLITS = {"train": TRAIN, "test": TEST}
    FEATURES = {}
    KEYS = None

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(self.FEATURES),
            supervised_keys=self.KEYS,
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.SPLITS}

    def _generate_examples(self, split):
        for i in range(self.SPLITS[split]):
            yield i, self.example(i, split)


class TinyImages(_Builder):
    """Grey images whose pixels are all 6 i, with the label i % 3."""

    FEATURES = {
        "image": tfds.features.Image(shape=(4, 5, 1)),
        "label": tfds.features.ClassLabel(names=["cat", "dog", "owl"]),
    }
    KEYS = ("image", "label")

    def example(self, i, split):
        return {"image": np.full((4, 5, 1), 6 * i, np.uint8), "label": i % 3}


class TinyPhotos(_Builder):
    """Colour images of several sizes; the labels of the test split are kept secret."""

    SPLITS = {"train": TRAIN, "validation": 5, "test": TEST}
    FEATURES = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(num_classes=2),
    }
    KEYS = ("image", "label")

    def example(self, i, split):
        image = np.full((3 + i % 4, 6, 3), 6 * i, np.uint8)
        return {"image": image, "label": -1 if split == "test" else i % 2}


class TinyTexts(_Builder):
    """Texts without a test split."""

    SPLITS = {"train": TRAIN}
    FEATURES = {
        "text": tfds.features.Text(),
        "label": tfds.features.ClassLabel(names=["bad", "good"]),
    }
    KEYS = ("text", "label")

    def example(self, i, split):
        return {"text": f"text {i}", "label": i % 2}


class TinyPrices(_Builder):
    """No classes."""

    FEATURES = {"size": np.float32, "price": np.float32}
    KEYS = ("size", "price")

    def example(self, i, split):
        return {"size": i, "price": 2 * i}


class TinyUnprepared(TinyImages):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the data sets were prepared."""
    folder = tmp_path_factory.mktemp("tfds")
    for builder in (TinyImages, TinyPhotos, TinyTexts, TinyPrices):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    TinyImages(data_dir=folder / "other", file_format="tfrecord").download_and_prepare()
    return folder


@pytest.fixture(autouse=True)
def data_dir(monkeypatch, folder):
    monkeypatch.setenv("TFDS_DATA_DIR", str(folder))


def test_poisson_batches_of_images_on_disk():
    found = tfds_data.open_tfds("tiny_images")
    assert (found.name, found.class_names, found.num_classes) == (
        "tiny_images", ["cat", "dog", "owl"], 3,
    )  # fmt: skip
    assert (len(found.train), len(found.test)) == (TRAIN, TEST)
    for threads in (None, 2):
        sampler = keras_dp.PoissonSampler(
            found.train, batch_size=20, map_fn=found.to_pair, threads=threads
        )
        seen = set()
        for x, y, weight in sampler:
            real = ~is_padding(weight)
            number = np.rint(x[real][:, 0, 0, 0] * 255 / 6).astype(int)
            assert x.dtype == np.float32 and x.shape[1:] == (4, 5, 1) and y.dtype == np.int64
            assert np.all(x[real] == x[real][:, :1, :1]) and np.array_equal(number % 3, y[real])
            seen |= set(number.tolist())
        assert len(seen) > 10 and seen <= set(range(TRAIN))


def test_it_trains():
    found = tfds_data.open_tfds("tiny_images")
    model = keras.Sequential(
        [keras.Input((4, 5, 1)), keras.layers.Flatten(), keras.layers.Dense(found.num_classes)]
    )
    optimizer = keras_dp.DPSGD(0.1, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=20)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss)
    sampler = keras_dp.PoissonSampler(found.train, batch_size=20, map_fn=found.to_pair)
    test = keras_dp.PoissonSampler(found.test, batch_size=TEST, map_fn=found.to_pair)
    logger = keras_dp.callbacks.EpsilonLogger(sampler, delta=1e-3, verbose=0)
    logs = model.fit(sampler, epochs=2, validation_data=test, callbacks=[logger], verbose=0)
    assert optimizer.iterations == 4 and np.isfinite(logs.history["val_loss"]).all()


def test_images_of_several_sizes_are_resized_and_secret_labels_not_used():
    with pytest.raises(ValueError, match=r"several sizes.*image_size=\(height, width\)"):
        tfds_data.open_tfds("tiny_photos")
    found = tfds_data.open_tfds("tiny_photos", image_size=(8, 8))
    assert len(found.test) == 5
    x, y, _ = keras_dp.PoissonSampler(found.train, batch_size=TRAIN, map_fn=found.to_pair)[0]
    assert x.shape == (TRAIN, 8, 8, 3)
    np.testing.assert_allclose(np.ptp(x, axis=(1, 2, 3)), 0, atol=1e-5)
    np.testing.assert_array_equal(np.rint(x[:, 0, 0, 0] * 255 / 6) % 2, y)


def test_the_imagenet_recipe_crops_and_evaluates_them(monkeypatch):
    """Photos of several sizes, by the name of a data set whose size is known."""
    values = imagenet.define_flags()
    values(["imagenet.py", "--image_size=8", "--train_device_batch_size=10", "--dp_sigma=1"])
    monkeypatch.setitem(imagenet.DATASETS, "imagenet", ("tiny_photos", TRAIN + 1))
    with pytest.raises(ValueError, match="has 40 training images, expected 41"):
        imagenet.open_data(values)
    monkeypatch.setitem(imagenet.DATASETS, "imagenet", ("tiny_photos", TRAIN))
    found = imagenet.open_data(values)
    plan = imagenet.Plan(values, len(found.train), replicas=1)
    x, y, weight = imagenet.make_batches(values, found, plan)[0]
    x = x.array if hasattr(x, "array") else keras.tree.flatten(x)[0]
    assert x.shape[1:] == (8, 8, 3) and len(x) == len(y) == len(weight)
    grey = x * crops.DEVIATION + crops.MEAN  # every photo has one colour, 6 i, and label i % 2
    number = np.round(grey[..., 0].mean((1, 2)) * 255 / 6).astype(int)
    real = ~np.signbit(weight)
    np.testing.assert_array_equal(number[real] % 2, y[real])
    evaluation = imagenet.Evaluation(imagenet.build_model("wrn_10_1", 8, 2, 4), found, values, 1)
    assert 0 <= evaluation()["accuracy"] <= 1


def test_texts_and_a_split_that_is_held_out():
    found = tfds_data.open_tfds("tiny_texts")
    assert (len(found.train), len(found.test)) == (36, 4)
    x, y, _ = keras_dp.PoissonSampler(found.train, batch_size=36, map_fn=found.to_pair)[0]
    assert [int(text.decode().split()[1]) % 2 for text in x.numpy()] == y.tolist()


@pytest.mark.parametrize(
    "source", ["tiny_images", "{}/tiny_images/1.0.0", "{}/other/tiny_images/1.0.0"]
)
def test_the_dataset_flag_loads_arrays(folder, source):
    loaded = data.load("tfds:" + source.format(folder))
    assert (loaded.name, loaded.num_classes) == ("tiny_images", 3)
    assert loaded.x_train.shape == (TRAIN, 4, 5, 1) and loaded.x_test.shape == (TEST, 4, 5, 1)
    assert loaded.x_train.dtype == np.float32 and loaded.y_train.dtype == np.int64
    number = np.rint(loaded.x_train[:, 0, 0, 0] * 255 / 6)
    assert sorted(number) == list(range(TRAIN))
    np.testing.assert_array_equal(number % 3, loaded.y_train)
    assert np.bincount(loaded.y_test).tolist() == [3, 2, 2]


def test_texts_are_no_images():
    with pytest.raises(ValueError, match="Text.*images are needed.*open_tfds"):
        data.load("tfds:tiny_texts")


def test_no_classes():
    with pytest.raises(ValueError, match="no data set for classification.*'price', 'size'"):
        tfds_data.open_tfds("tiny_prices")


def test_missing_data_give_the_command(folder):
    command = f"tfds build tiny_unprepared --file_format=array_record --data_dir={folder}"
    words = f"not on this machine.*{command}"
    with pytest.raises(data.DataNotFoundError, match=words):
        data.load("tfds:tiny_unprepared")
    with pytest.raises(data.DataNotFoundError, match="no data set 'cats'"):
        data.load("tfds:cats")


def test_a_format_without_random_access_gives_the_command(folder):
    with pytest.raises(data.DataNotFoundError, match="tfrecord.*tfds build.*array_record"):
        tfds_data.open_tfds(str(folder / "other" / "tiny_images" / "1.0.0"))


def test_the_package_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(data.DataNotFoundError, match="pip install tensorflow-datasets"):
        data.load("tfds:mnist")
