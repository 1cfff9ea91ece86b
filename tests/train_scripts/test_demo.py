"""The demo end to end, as a user runs it, with few images and few epochs."""

import json
import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_dp
from tests.train_scripts.idx_files import digit_images, write_idx_folder
from train_scripts import data

ROOT = pathlib.Path(__file__).resolve().parents[2]


def run(*arguments, cwd):
    """Runs Python from a folder other than the repository's."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=cwd,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    """The folder of results, the folder of images, and the finished process."""
    folder = tmp_path_factory.mktemp("demo")
    write_idx_folder(folder / "digits", digit_images(300, seed=1), digit_images(100, seed=2))
    process = run(
        ROOT / "train_scripts" / "demo.py",
        "--dataset=digits",
        "--output_dir=results",
        "--target_epsilon=4",
        "--delta=1e-4",
        "--epochs=2",
        "--batch_size=70",
        "--l2_norm_clip=2",
        "--learning_rate=0.02",
        "--public_epochs=3",
        "--nonprivate_epochs=1",
        cwd=folder,
    )
    assert process.returncode == 0, process.stderr
    return folder / "results", folder / "digits", process


@pytest.fixture(scope="module")
def results(small_run):
    return json.loads((small_run[0] / "results.json").read_text())


def test_flags_reach_the_run(results):
    expected = {
        "dataset": "digits",
        "private_examples": 300,
        "test_examples": 100,
        "target_epsilon": 4.0,
        "delta": 1e-4,
        "optimizer": "dp_lamb",
        "l2_norm_clip": 2.0,
        "batch_size": 70,
        "updates": 10,  # 2 * ceil(300 / 70)
        "updates_per_epoch": 5,
        "trained_layers": ["features", "logits"],
        "trained_weights": 3136 * 128 + 128 + 128 * 10 + 10,
    }
    assert {key: results[key] for key in expected} == expected
    assert results["learning_rate"] == pytest.approx(0.02)


def test_epsilon_is_that_of_the_updates_made(results):
    """By the accountant, from the noise that was used and the number of updates."""
    for record, updates in zip(results["private_epochs"], (5, 10), strict=True):
        epsilon = keras_dp.compute_epsilon(
            num_examples=300,
            batch_size=70,
            noise_multiplier=results["noise_multiplier"],
            delta=1e-4,
            steps=updates,
        )
        assert record["epsilon"] == pytest.approx(epsilon, rel=1e-6)
    assert results["private_epochs"][-1]["epsilon"] == results["epsilon"]
    assert 3.99 < results["epsilon"] <= 4


def test_the_three_accuracies(results, small_run):
    """Public digits were learned, and the training images are other public digits."""
    assert results["public_only_accuracy"] > 0.5
    assert results["private_accuracy"] > 0.3
    assert results["nonprivate_accuracy"] > 0.5
    assert results["private_epochs"][-1]["test_accuracy"] == pytest.approx(
        results["private_accuracy"]
    )
    printed = small_run[2].stdout
    for label, key in (
        ("public data only", "public_only_accuracy"),
        ("private, dp_lamb", "private_accuracy"),
        ("not private, plain Keras", "nonprivate_accuracy"),
    ):
        line = next(s for s in printed.splitlines() if s.startswith(f"  {label} "))
        assert line.endswith(f" {results[key]:.3f}")


def test_the_guarantee_is_printed_and_written(results, small_run):
    assert results["guarantee"] in small_run[2].stdout
    for words in ("epsilon = 4 at delta = 0.0001", "10 updates", "Poisson", "70/300"):
        assert words in results["guarantee"]


def test_nothing_that_is_random_for_privacy_has_a_seed(small_run):
    """The sampler and the optimizers warn when they get a fixed seed."""
    assert "seed" not in small_run[2].stderr


def test_the_saved_model_is_the_private_one(results, small_run):
    model = keras.saving.load_model(small_run[0] / "model.keras")
    assert isinstance(model.optimizer, keras_dp.DPLamb)
    assert model.optimizer.noise_multiplier == results["noise_multiplier"]
    digits = data.load_idx_folder(small_run[1])
    accuracy = np.mean(model.predict(digits.x_test, verbose=0).argmax(-1) == digits.y_test)
    assert accuracy == pytest.approx(results["private_accuracy"])


def test_the_figure_is_a_png(small_run):
    content = (small_run[0] / "accuracy.png").read_bytes()
    assert content.startswith(b"\x89PNG\r\n")
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (840, 720)


def test_defaults_with_another_optimizer(tmp_path):
    """As a module, on the default data, with few epochs."""
    process = subprocess.run(
        [sys.executable, "-m", "train_scripts.demo", f"--output_dir={tmp_path}"]
        + "--optimizer=dp_momentum --trained_layers=logits --batch_size=2000".split()
        + "--epochs=2 --public_epochs=2 --nonprivate_epochs=1".split(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert (results["dataset"], results["private_examples"]) == ("mnist5k", 4000)
    assert (results["optimizer"], results["updates"]) == ("dp_momentum", 4)
    assert results["trained_weights"] == 128 * 10 + 10
    assert 2.99 < results["epsilon"] <= 3
    assert results["delta"] == 1e-5


def test_unsuitable_data_end_the_program_with_the_reason(tmp_path):
    letters = np.zeros((4, 20, 20)), np.arange(4)
    write_idx_folder(tmp_path / "letters", letters, letters)
    script = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from train_scripts import demo
for folder in ("nowhere", "letters"):
    demo.FLAGS(["demo", f"--dataset={{folder}}"])
    try:
        demo.load_private()
    except SystemExit as end:
        print(end.code)
"""
    process = run("-c", script, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    missing, unsuitable = process.stdout.strip().splitlines()
    assert 'no folder "nowhere"' in missing
    assert "images of shape (20, 20, 1) and 4 classes" in unsuitable
