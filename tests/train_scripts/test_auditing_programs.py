"""The auditing programs, called as their main functions, on small trainings."""

import json

import keras
import numpy as np
import pytest

import keras_dp
from train_scripts import audit as audit_program
from train_scripts import membership as membership_program


def audit(*flags):
    audit_program.main(["train_scripts/audit.py", *flags])


def membership(*flags):
    membership_program.main(["train_scripts/membership.py", *flags])


def message_of(program, *flags):
    with pytest.raises(SystemExit) as stopped:
        program(*flags)
    return stopped.value.code


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A compiled model with a DP optimizer, and examples of three classes."""
    folder = tmp_path_factory.mktemp("audit")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 6)).astype("float32"), rng.integers(0, 3, 120)
    np.savez(folder / "examples.npz", x=x, y=y)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3)])
    model.compile(
        keras_dp.DPSGD(0.1, l2_norm_clip=2.0, noise_multiplier=3.0, batch_size=40),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.save(folder / "model.keras")
    return [f"--model={folder / 'model.keras'}", f"--data={folder / 'examples.npz'}"]


def test_an_audit_of_the_digits(tmp_path, capsys):
    png = tmp_path / "audit.png"
    audit("--steps=3", "--canaries=200", f"--png={png}")
    out = capsys.readouterr().out
    assert "Audit by one training with 200 canaries" in out and "does not refute" in out
    assert is_picture(png)


def test_an_audit_of_a_users_model_and_data(files, capsys):
    """The claim is that of the model's own optimizer on these examples."""
    audit("--steps=4", "--canary=mislabelled", "--canaries=20", "--json", *files)
    report = json.loads(capsys.readouterr().out)
    phase = keras_dp.accounting.Phase.from_dict(report["phase"])
    assert (phase.num_examples, phase.batch_size, phase.noise_multiplier) == (120, 40, 3.0)
    claim = keras_dp.accounting.epsilon_of_phases([phase], 1e-5, "pld")
    assert report["claimed_epsilon"] == claim and not report["refuted"]
    values = list(report["bounds"]["epsilon"].values())
    assert values == sorted(values, reverse=True)


def test_many_runs(files, tmp_path, capsys):
    png = tmp_path / "audit.png"
    audit("--audit=many_runs", "--runs=10", "--steps=1", f"--png={png}", *files)
    assert "10 trainings with and 10 without a canary" in capsys.readouterr().out
    assert is_picture(png)


def test_a_refuted_claim_ends_with_status_1(files, monkeypatch, capsys):
    monkeypatch.setattr(keras_dp.DPSGD, "noise_stddev", property(lambda self: 1e-6), raising=False)
    code = message_of(audit, "--steps=60", "--canaries=300", *files)
    assert code == 1 and "REFUTES" in capsys.readouterr().out


def test_membership_without_and_with_privacy(files, tmp_path, capsys):
    """Random labels are learned by heart, but not privately."""
    flags = ["--models=6", "--epochs=20", "--private_epochs=2", "--batch_size=20"]
    flags += ["--target_epsilon=0.5", "--learning_rate=0.1", files[1]]
    png = tmp_path / "membership.png"
    membership("--json", f"--png={png}", *flags)
    report = json.loads(capsys.readouterr().out)
    open_, private = (report[kind]["reports"] for kind in ("not private", "private"))
    assert [r["attack"] for r in open_] == ["loss threshold", "LiRA, offline", "LiRA"]
    assert open_[2]["auc"] > 0.6 > private[2]["auc"]
    assert open_[0]["members"] == open_[0]["non_members"] == 360
    assert is_picture(png)


def test_each_example_is_in_half_of_the_models():
    members = membership_program.halves(8, 20, np.random.default_rng(0))
    np.testing.assert_array_equal(members.sum(0), 4)
    np.testing.assert_array_equal(members.sum(1), 10)


def test_wrong_flags_are_one_message(files, tmp_path):
    assert "--data takes digits or an .npz" in message_of(audit, "--data=nowhere.npz")
    assert "cannot be loaded" in message_of(audit, "--model=nowhere.keras")
    np.savez(tmp_path / "x.npz", x=np.zeros(3))
    assert "must hold x and y" in message_of(audit, f"--data={tmp_path / 'x.npz'}")
    np.savez(tmp_path / "float.npz", x=np.zeros((9, 6)), y=np.zeros(9))
    wrong = [f"--data={tmp_path / 'float.npz'}", files[0]]
    assert "integer labels" in message_of(audit, "--canary=mislabelled", "--canaries=2", *wrong)
    assert "integer labels" in message_of(membership, wrong[0])
    assert "at least 6" in message_of(membership, "--models=2", files[1])
