"""The classifier program end to end, with few examples and updates."""

import json

import keras
import numpy as np
import pytest

import keras_dp
from tests.train_scripts.idx_files import digit_images, write_idx_folder
from train_scripts import train_classifier


def call(folder, *arguments):
    """In this process; returns results.json."""
    train_classifier.main(
        ["train_classifier.py", f"--output_dir={folder}", "--verbose=0", *arguments]
    )
    return json.loads((folder / "results.json").read_text())


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("idx") / "small"
    write_idx_folder(folder, digit_images(400, seed=1), digit_images(100, seed=2))
    return f"--dataset=folder:{folder}"


def test_private_and_not_beside_each_other(tmp_path, recwarn):
    """On scikit-learn's digits: two seeds with privacy, then one without, in one file."""
    shared = ["--dataset=digits", "--model=linear", "--epochs=4", "--batch_size=256"]
    results = call(tmp_path, *shared, "--target_epsilon=3", "--learning_rate=4", "--seeds=0,1")
    # Sampler and optimizer warn when they get a seed: --seeds must not reach them.
    assert not [w for w in recwarn if "seed" in str(w.message)]
    private = results["private"]
    assert [one["seed"] for one in private["runs"]] == [0, 1]
    accuracies = [one["accuracy"] for one in private["runs"]]
    assert private["accuracy_mean"] == pytest.approx(np.mean(accuracies))
    assert private["accuracy_spread"] == pytest.approx(np.std(accuracies, ddof=1))
    assert min(accuracies) > 0.6
    assert private["runs"][0]["updates"] == 4 * 6  # ceil(1437 / 256)
    arguments = {"num_examples": 1437, "batch_size": 256, "delta": 1e-5}
    arguments |= {"noise_multiplier": private["noise_multiplier"]}
    once, twice = (keras_dp.compute_epsilon(steps=n, **arguments) for n in (24, 48))
    assert private["epsilon"] == pytest.approx(once, rel=1e-6) and 2.95 < once <= 3
    assert private["epsilon_of_all_runs"] == pytest.approx(twice, rel=1e-6)
    assert "24 updates" in private["guarantee"]
    results = call(tmp_path, *shared, "--disable_dp", "--learning_rate=0.5")
    assert results["private"] == private
    plain = results["without_privacy"]
    assert plain["accuracy_mean"] > 0.8 and "epsilon" not in plain
    model = keras.saving.load_model(tmp_path / "private.keras")
    assert isinstance(model.optimizer, keras_dp.DPMomentum)


def test_scattering_features_with_a_linear_model(digits, tmp_path):
    results = call(
        tmp_path,
        digits,
        "--features=scattering",
        "--model=normalized_linear",
        "--epochs=3",
        "--batch_size=200",
        "--l2_norm_clip=0.2",
        "--learning_rate=32",
        "--noise_multiplier=1",
    )["private"]
    assert results["accuracy_mean"] > 0.6
    assert results["trained_weights"] == 39_700


@pytest.mark.slow
def test_every_option_of_private_training(digits, tmp_path):
    """Copies of moved and mirrored images, pieces, an average of the weights, a schedule."""
    results = call(
        tmp_path,
        digits,
        "--model=cnn",
        "--activation=tempered_sigmoid",
        "--epochs=2",
        "--batch_size=200",
        "--physical_batch_size=100",
        "--noise_multiplier=0.8",
        "--clipping=automatic",
        "--augmentations=2",
        "--shift=3",
        "--flip",
        "--ema=0.5",
        "--optimizer=adam",
        "--learning_rate=0.01",
        "--lr_schedule=cos",
        "--warmup_epochs=1",
    )["private"]
    (run,) = results["runs"]
    assert run["updates"] == 4
    expected = keras_dp.compute_epsilon(
        num_examples=400, batch_size=200, noise_multiplier=0.8, delta=1e-5, steps=4
    )
    assert results["epsilon"] == pytest.approx(expected, rel=1e-6)
    model = keras.saving.load_model(tmp_path / "private.keras")
    assert model.optimizer.use_ema and model.optimizer.augmentations == 2
    assert model.optimizer.clipping == "automatic"
    # The layers that move images rest in testing, so the saved model has the accuracy told.
    x, y = digit_images(100, seed=2)
    predicted = model.predict((x / 255)[..., None].astype(np.float32), verbose=0).argmax(-1)
    assert np.mean(predicted == y) == pytest.approx(run["accuracy"])


@pytest.mark.parametrize(
    "name, shape",
    [
        ("deep_cnn", (16, 16, 3)),
        ("mlp", (16, 16, 3)),
        ("resnet18v2", (16, 16, 3)),
        ("wrn10_1", (16, 16, 3)),
        ("vit_ti16", (16, 16, 3)),
        ("scattering_cnn", (7, 7, 81)),
    ],
)
def test_models_by_name(name, shape):
    values = train_classifier.define_flags()
    values(["train_classifier.py", f"--model={name}", "--weight_standardization"])
    model = train_classifier.build_model(values, shape, 7)
    assert model.output_shape == (None, 7)
    assert keras_dp.validate(model) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--noise_multiplier=1", "--target_epsilon=1"], "Give one of --target_epsilon and"),
        ([], "Give one of --target_epsilon and"),
        (["--disable_dp", "--model=lenet"], "--model takes .*received 'lenet'"),
        (["--disable_dp", "--model=linear", "--augmentations=4"], "give --shift or --flip too"),
        (["--disable_dp", "--seeds=a"], "--seeds takes whole numbers"),
        (["--disable_dp", "--dataset=folder:nowhere"], 'no folder "nowhere"'),
        (["--disable_dp", "--features=scattering"], "multiples of 2.scales"),
    ],
)
def test_bad_flags_are_named(tmp_path, monkeypatch, arguments, message):
    if "--features=scattering" in arguments:
        images = np.zeros((4, 30, 30)), np.arange(4)
        write_idx_folder(tmp_path / "odd", images, images)
        arguments = [*arguments, f"--dataset=folder:{tmp_path / 'odd'}"]
    with pytest.raises(SystemExit, match=message):
        call(tmp_path, "--dataset=digits", *arguments)
