"""The ImageNet recipe end to end on small folders of images that the tests make."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import warnings

import keras
import numpy as np
import pytest

import keras_dp
from tests.train_scripts.image_files import write_image_folder
from train_scripts import imagenet

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = ["--image_size=16", "--model=rn_c8_b1_1_1_1", "--norm_groups=4", "--threads=2"]
SMALL += ["--train_device_batch_size=10", "--grad_acc_steps=2", "--dp_delta=1e-3"]
# 90 images: 5 updates of 20 examples an epoch.
PRIVATE = ["--num_train_epochs=3", "--dp_sigma=1.5", "--num_layers_to_freeze=4"]


def epsilon(updates, **arguments):
    """By the accountant, from what the flags say."""
    arguments = {"sampling": "poisson", "noise_multiplier": 1.5} | arguments
    return keras_dp.compute_epsilon(
        num_examples=90, batch_size=20, delta=1e-3, steps=updates, **arguments
    )


def call(*arguments):
    """In this process; what ends it with a message raises SystemExit."""
    imagenet.main(["imagenet.py", *SMALL, *map(str, arguments)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Images, and a network pretrained on the public ones without privacy."""
    folder = tmp_path_factory.mktemp("imagenet")
    write_image_folder(folder / "public", classes=4, train=30, test=6, seed=1)
    write_image_folder(folder / "private", classes=3, train=30, test=6, seed=2)
    call(
        "--disable_dp",
        f"--dataset=folder:{folder / 'public'}",
        f"--model_dir={folder / 'pretrained'}",
        "--num_train_epochs=4",
        "--base_learning_rate=1",
        "--norandom_crops",
    )
    return folder


def private_flags(folder, name, *more):
    return [
        f"--dataset=folder:{folder / 'private'}",
        f"--model_dir={folder / name}",
        f"--finetune_path={folder / 'pretrained'}",
        *PRIVATE,
        *more,
    ]


def results_of(path):
    return json.loads((path / "results.json").read_text())


@pytest.fixture(scope="module")
def unbroken(folder):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call(*private_flags(folder, "unbroken", "--keep_ckpts=2", "--eval_every_n_steps=2"))
    # Sampler and optimizer warn when they get a seed: --rnd_seed must not reach them.
    assert not [w for w in told if "seed" in str(w.message)]
    return folder / "unbroken"


def test_pretraining_is_not_private_and_learns(folder):
    results = results_of(folder / "pretrained")
    assert results["accuracy"] > 0.4 and "epsilon" not in results
    assert results["updates"] == 24 and results["noise_multiplier"] is None  # 120 images, 20 each
    assert not (folder / "pretrained" / "privacy_ledger.json").exists()


def test_only_what_is_not_frozen_is_trained_from_the_public_weights(folder, unbroken):
    public = keras.saving.load_model(folder / "pretrained" / "model.keras", compile=False)
    private = keras.saving.load_model(unbroken / "model.keras", compile=False)
    assert (public.output_shape[-1], private.output_shape[-1]) == (4, 3)
    for mine, theirs in zip(private.layers[:-1], public.layers[:-1]):
        frozen = mine.name.startswith(("stem", "stage1", "stage2", "stage3"))
        for a, b in zip(mine.get_weights(), theirs.get_weights()):
            assert np.array_equal(a, b) == frozen, mine.name
    results = results_of(unbroken)
    trained = [v for v in private.weights if v.path.split("/")[-2].startswith(("stage4", "norm"))]
    expected = sum(int(np.prod(v.shape)) for v in trained) + 64 * 3 + 3
    assert results["trained_weights"] == expected


def test_epsilon_of_every_epoch(unbroken):
    """Of the Poisson draws that were made, in pieces: one update for two of them."""
    lines = [json.loads(line) for line in (unbroken / "metrics.jsonl").read_text().splitlines()]
    epochs = {line["epoch"]: line for line in lines if line["epoch"]}
    for epoch in (1, 2, 3):
        assert epochs[epoch]["update"] == 5 * epoch
        assert epochs[epoch]["epsilon"] == pytest.approx(epsilon(5 * epoch), rel=1e-6)
    between = [line["update"] for line in lines if line["epoch"] is None]
    assert between == [2, 4, 6, 8, 10, 12, 14]
    results = results_of(unbroken)
    assert results["updates"] == 15 and results["batch_size"] == 20
    assert results["epsilon"] == pytest.approx(epsilon(15), rel=1e-6)
    assert "Poisson" in results["guarantee"] and "20/90" in results["guarantee"]


def test_checkpoints_are_kept_and_dropped(unbroken):
    found = sorted(path.name for path in unbroken.glob("ckpt-*"))
    assert found == ["ckpt-0002.keras", "ckpt-0003.keras"]
    assert not (unbroken / "backup").exists() or not any((unbroken / "backup").iterdir())


def test_the_optimizer_is_that_of_the_flags(unbroken):
    optimizer = keras.saving.load_model(unbroken / "model.keras").optimizer
    assert isinstance(optimizer, keras_dp.DPMomentum)
    assert (optimizer.momentum, optimizer.nesterov) == (0.9, True)
    assert (optimizer.l2_norm_clip, optimizer.noise_multiplier) == (1.0, 1.5)
    assert (optimizer.batch_size, optimizer.gradient_accumulation_steps) == (20, None)
    assert float(optimizer._learning_rate(5)) == pytest.approx(2.0 * 20 / 256)  # base 2, warm


def test_a_run_that_has_ended_is_not_repeated(folder, unbroken):
    with pytest.raises(SystemExit, match="has ended"):
        call(*private_flags(folder, "unbroken"))


KILLED = """
import os, signal, sys
import keras
from train_scripts import imagenet

after, argv = int(sys.argv[1]), ["imagenet.py", *sys.argv[2:]]

class Kill(imagenet.Reports):
    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, logs)
        if after % 5 and int(self.model.optimizer.iterations) == after:
            os.kill(os.getpid(), signal.SIGKILL)

class Backup(keras.callbacks.BackupAndRestore):
    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        if int(self.model.optimizer.iterations) == after:
            os.kill(os.getpid(), signal.SIGKILL)

imagenet.Reports, keras.callbacks.BackupAndRestore = Kill, Backup
imagenet.main(argv)
"""


def killed(folder, name, after):
    """A run that dies by SIGKILL once it has made so many updates."""
    arguments = [str(after), *SMALL, *private_flags(folder, name)]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments],
        cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "2"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folder / name


def spent(path):
    """Updates in a ledger, by hand."""
    ledger = json.loads((path / "privacy_ledger.json").read_text())
    return sum(entry["phase"]["steps"] for entry in ledger["entries"])


@pytest.mark.slow
def test_killed_between_epochs_and_resumed(folder, unbroken):
    """Updates and epsilon are those of an unbroken run."""
    path = killed(folder, "between", after=5)
    assert not (path / "results.json").exists()
    assert spent(path) == 5
    call(*private_flags(folder, "between"))
    results, expected = results_of(path), results_of(unbroken)
    assert results["updates"] == expected["updates"] == 15
    assert results["epsilon"] == pytest.approx(expected["epsilon"], rel=1e-9)
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if line["epoch"]] == [1, 2, 3]


def test_killed_within_an_epoch_and_resumed(folder, unbroken):
    """It goes on from the last epoch; the updates that are lost stay counted."""
    path = killed(folder, "within", after=8)
    lost = spent(path) - 5
    assert lost >= 3
    first = keras.saving.load_model(path / "ckpt-0001.keras")
    assert int(first.optimizer.iterations) == 5
    call(*private_flags(folder, "within"))
    results = results_of(path)
    assert results["updates"] == 15
    assert results["epsilon"] == pytest.approx(epsilon(15 + lost), rel=1e-6)
    with pytest.raises(SystemExit, match="has ended"):
        call(*private_flags(folder, "within"))


def test_other_flags_make_another_run(folder):
    path = folder / "flags"
    path.mkdir()
    values = imagenet.define_flags()
    arguments = private_flags(folder, "flags")
    values(["imagenet.py", *SMALL, *arguments])
    imagenet.same_run(values)
    imagenet.same_run(values)
    values(["imagenet.py", "--eval_every_n_steps=7"])  # may change
    imagenet.same_run(values)
    values(["imagenet.py", "--dp_sigma=0.5"])
    with pytest.raises(ValueError, match="--dp_sigma=1.5 is now 0.5"):
        imagenet.same_run(values)


@pytest.mark.slow
def test_shuffled_batches_are_accumulated_without_amplification(folder):
    """8 batches of 12 are 4 updates of 24; each pass counts once."""
    call(
        f"--dataset=folder:{folder / 'private'}",
        f"--model_dir={folder / 'shuffled'}",
        "--num_train_epochs=1",
        "--dp_sigma=4",
        "--sampling=shuffle",
        "--train_device_batch_size=12",
        "--optimizer=lamb",
        "--base_learning_rate=0.05",
    )
    results = results_of(folder / "shuffled")
    assert (results["updates"], results["batch_size"]) == (4, 24)
    expected = keras_dp.compute_epsilon(
        num_examples=90, batch_size=24, noise_multiplier=4, delta=1e-3, epochs=1, sampling="shuffle"
    )
    assert results["epsilon"] == pytest.approx(expected, rel=1e-6)


def test_weight_decay_is_a_penalty_on_kernels():
    import models

    model = models.resnet((8, 8, 3), 3, None, blocks=(1,), width=4, groups=2)
    imagenet.penalize_kernels(model, 0.1)
    kernels = [v for v in model.trainable_variables if v.name == "kernel"]
    expected = 0.05 * sum(float(np.sum(np.square(k))) for k in kernels)
    assert float(sum(model.losses)) == pytest.approx(expected, rel=1e-5)
    assert all(v.regularizer is None for v in model.trainable_variables if v.name != "kernel")


@pytest.mark.parametrize(
    "name, parameters",
    [("resnet18", 11_687_720), ("rnb_c4_b1_1_1_1", None), ("wrn_10_1", None), ("vit_ti16", None)],
)
def test_models_by_name(name, parameters):
    model = imagenet.build_model(name, 224 if parameters else 32, 1000, 4)
    assert model.name == name and model.output_shape == (None, 1000)
    if parameters:
        assert model.count_params() == parameters


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--dp_sigma=1", "--target_epsilon=3"], "Give one of --dp_sigma and --target_epsilon"),
        (["--disable_dp", "--model=alexnet"], "--model takes .*received 'alexnet'"),
        (["--disable_dp", "--dataset=mnist"], "--dataset takes imagenet, places365"),
        (["--disable_dp", "--grad_acc_steps=99"], "10 x 1 x 99 = 990 .* only 90"),
        (["--disable_dp", "--strategy=nonsense"], "strategy"),
        (["--disable_dp", "--finetune_path=nowhere"], "there is no file nowhere"),
    ],
)
def test_bad_flags_are_named(folder, tmp_path, arguments, message):
    data = f"--dataset=folder:{folder / 'private'}"
    with pytest.raises(SystemExit, match=message):
        call(data, f"--model_dir={tmp_path / 'bad'}", *arguments)


def test_another_number_of_classes_needs_a_new_last_layer(folder, tmp_path):
    with pytest.raises(SystemExit, match="has 4 classes; .*3. Another number"):
        call(
            *private_flags(folder, "unused"),
            "--nofinetune_cut_last_layer",
            f"--model_dir={tmp_path}",
        )
