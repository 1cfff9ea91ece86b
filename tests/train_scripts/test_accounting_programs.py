"""The accounting programs, called as their main functions, and one as a user runs it."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from keras_dp.accounting import compute_epsilon, compute_noise_multiplier, privacy_statement
from train_scripts import compute_epsilon as epsilon_program
from train_scripts import compute_noise as noise_program
from train_scripts import plan as plan_program

ROOT = pathlib.Path(__file__).resolve().parents[2]
RUN = {"num_examples": 60000, "batch_size": 256, "delta": 1e-5, "epochs": 60}
FLAGS = [f"--{name}={value}" for name, value in RUN.items()]
PROGRAMS = {
    "compute_epsilon": epsilon_program,
    "compute_noise": noise_program,
    "plan": plan_program,
}


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def call(name, *flags):
    PROGRAMS[name].main([f"train_scripts/{name}.py", *flags])


def message_of(name, *flags):
    with pytest.raises(SystemExit) as stopped:
        call(name, *flags)
    return stopped.value.code


def test_epsilon_prints_the_statement(capsys):
    call("compute_epsilon", "--noise_multiplier=1.1", *FLAGS)
    expected = privacy_statement(noise_multiplier=1.1, **RUN)
    assert capsys.readouterr() == (expected + "\n", "")


def test_epsilon_as_json(capsys):
    more = ["--json", "--group_size=3", "--neighboring_relation=zero_out"]
    call("compute_epsilon", "--noise_multiplier=1.1", *more, *FLAGS)
    report = json.loads(capsys.readouterr().out)
    assert report["epsilon_rdp"] == compute_epsilon(noise_multiplier=1.1, **RUN)
    assert report["neighboring_relation"] == "zero_out" and report["group"]["size"] == 3


def test_noise_prints_a_number_that_keeps_the_target(capsys):
    call("compute_noise", "--target_epsilon=3", *FLAGS)
    line, guarantee = capsys.readouterr().out.splitlines()
    sigma = float(line.removeprefix("noise_multiplier="))
    assert sigma == compute_noise_multiplier(target_epsilon=3.0, **RUN)
    assert guarantee == privacy_statement(noise_multiplier=sigma, **RUN)
    call("compute_noise", "--target_epsilon=3", "--accountant=pld", *FLAGS)
    by_pld = float(capsys.readouterr().out.splitlines()[0].removeprefix("noise_multiplier="))
    assert by_pld < sigma


def test_plan_prints_tables(capsys):
    flags = ["--num_examples=1000", "--delta=1e-5", "--batch_sizes=50,100", "--epochs=10,2"]
    call("plan", "--noise_multipliers=2,1", "--target_epsilon=2", *flags)
    first, second = capsys.readouterr().out.strip().split("\n\n")
    title, header, low, high, noise = (line.split() for line in second.splitlines())
    assert title[:3] == ["batch", "size", "100"] and header[-2:] == ["2", "10"]
    run = {"num_examples": 1000, "batch_size": 100, "delta": 1e-5}
    for row, sigma in ((low, 1.0), (high, 2.0)):
        expected = [
            f"{compute_epsilon(noise_multiplier=sigma, epochs=e, **run):.4g}" for e in (2, 10)
        ]
        assert row == [f"{sigma:g}", *expected]
    expected = [compute_noise_multiplier(target_epsilon=2.0, epochs=e, **run) for e in (2, 10)]
    assert noise == ["noise", "for", "2", *(f"{sigma:.4g}" for sigma in expected)]
    assert first.startswith("batch size 50 (20 updates an epoch)")


def test_plan_draws(tmp_path, capsys):
    path = tmp_path / "plan.png"
    call("plan", "--num_examples=1000", "--delta=1e-5", f"--png={path}")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000
    assert f"drawn to {path}" in capsys.readouterr().out
    text = message_of("plan", "--num_examples=1000", "--delta=1e-5", "--png=/nowhere/plan.png")
    assert "--png=/nowhere/plan.png could not be drawn" in text


def test_plan_of_other_batches(capsys):
    call("plan", "--num_examples=1000", "--delta=1e-5", "--sampling=full_batch", "--epochs=1")
    assert capsys.readouterr().out.startswith("batch size 1000 (1 updates an epoch)")


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_missing_is_named(name):
    text = message_of(name)
    assert text.startswith(f"{name}.py: --num_examples, ") and "--delta must be given" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "name, flags, words",
    [
        ("compute_epsilon", [*FLAGS, "--noise_multiplier=nan"], "noise_multiplier must be"),
        ("compute_epsilon", [*FLAGS, "--noise_multiplier=x"], "--noise_multiplier=x"),
        ("compute_epsilon", [*FLAGS, "--noise_multiplier=1", "--delta=2"], "delta must be"),
        ("compute_epsilon", [*FLAGS, "--noise_multiplier=1", "--steps=3"], "Exactly one of"),
        ("compute_epsilon", [*FLAGS, "--noise=1"], "noise"),
        ("compute_epsilon", [*FLAGS, "--noise_multiplier=1", "3"], "unknown arguments: 3"),
        ("compute_noise", [*FLAGS, "--target_epsilon=-1"], "target_epsilon must be"),
        ("compute_noise", [*FLAGS, "--target_epsilon=1e-9"], "No noise_multiplier reaches"),
        ("compute_noise", [*FLAGS, "--target_epsilon=1", "--sampling=gdp"], "--sampling=gdp"),
        ("plan", ["--num_examples=9", "--delta=1e-5", "--epochs=a"], "--epochs takes whole"),
        ("plan", ["--num_examples=9", "--delta=1e-5", "--epochs=0"], "received 0"),
        ("plan", ["--num_examples=9", "--delta=1e-5", "--epochs="], "--epochs takes whole"),
        ("plan", ["--num_examples=9", "--delta=1e-5", "--batch_sizes=10"], "batch_size=10 is"),
        ("plan", ["--num_examples=9", "--delta=1e-5", "--noise_multipliers=nan"], "received nan"),
        ("plan", ["--num_examples=0", "--delta=1e-5"], "num_examples must be"),
        ("plan", ["--num_examples=9", "--delta=1e-5", "--target_epsilon=0"], "target_epsilon"),
    ],
)
def test_bad_flags_are_one_message(name, flags, words):
    text = message_of(name, *flags)
    assert text.startswith(f"{name}.py: ") and words in text and "Traceback" not in text


def test_warnings_are_lines_of_the_program(capsys):
    call("compute_epsilon", "--noise_multiplier=0", *FLAGS)
    out, err = capsys.readouterr()
    assert out.startswith("NOT PRIVATE")
    assert err.startswith("compute_epsilon.py: warning: NOT PRIVATE") and ".py:" not in err[20:]


@pytest.mark.parametrize("name", PROGRAMS)
def test_help(name, capsys):
    assert message_of(name, "--help") == 0
    out = capsys.readouterr().out
    assert "--num_examples" in out and f"python train_scripts/{name}.py" in out


def test_a_program_runs_from_anywhere(tmp_path):
    process = subprocess.run(
        [sys.executable, ROOT / "train_scripts" / "compute_epsilon.py", *FLAGS, "--delta=7"]
        + ["--noise_multiplier=1"],
        cwd=tmp_path,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert process.returncode == 1 and process.stdout == ""
    assert "compute_epsilon.py: delta must be" in process.stderr
    assert "Traceback" not in process.stderr
