"""Clocks, limits and the runner, with processes that take seconds."""

import json
import pathlib
import subprocess
import sys

import pytest

from benchmarks import clock, limits

ROOT = pathlib.Path(__file__).resolve().parents[2]


def stepping(seconds, steps, max_seconds=60):
    """A clock that has seen steps of these lengths, as far as it let them happen."""
    step_clock = clock.StepClock(steps, max_seconds)
    for value in seconds:
        if step_clock.done:
            break
        step_clock.seconds.append(value)
    return step_clock


@pytest.mark.parametrize(
    "seconds, steps, max_seconds, timed",
    [
        ([9, 1, 1, 2, 3, 4], 6, 60, [2, 3, 4]),
        ([9, 1, 1, 2, 3, 4], 5, 60, [2, 3]),
        ([9, 5], 2, 60, [5]),
        ([9], 1, 60, [9]),
        ([100, 7, 8, 9, 9], 12, 10, [8]),  # slow steps: fewer of them
        ([100, 70, 70], 12, 60, [70]),
        ([9, 3, 3, 3, 3, 3], 12, 11, [3, 3]),
    ],
)
def test_which_steps_count(seconds, steps, max_seconds, timed):
    step_clock = stepping(seconds, steps, max_seconds)
    assert step_clock.done
    assert step_clock.timed == timed


def test_the_clock_runs_a_step_until_there_are_enough():
    calls, step_clock = [], clock.StepClock(3, 60)
    step_clock.run(lambda: calls.append(len(step_clock.seconds)))
    assert calls == [0, 1, 2]
    assert all(value >= 0 for value in step_clock.seconds)


def run_python(code, tmp_path, seconds=60.0, gigabytes=4.0):
    log = tmp_path / "logs" / "x.log"
    command = [sys.executable, "-c", code]
    return limits.run(command, seconds=seconds, gigabytes=gigabytes, log=log), log


def test_result_of_a_program(tmp_path):
    result, log = run_python(
        "import sys; print('noise'); print('{\"a\": 1}'); print('why', file=sys.stderr)", tmp_path
    )
    assert result == {"a": 1}
    assert log.read_text() == "why\n"


def test_over_the_time_limit(tmp_path):
    result, _ = run_python("import time; time.sleep(600)", tmp_path, seconds=0.5)
    assert result["error"] == "over the limit of 0.5 s"


def test_over_the_memory_limit(tmp_path):
    code = "import time; x = bytearray(b'1') * 2**28; time.sleep(600)"
    result, _ = run_python(code, tmp_path, gigabytes=0.125)
    assert result["error"] == "over the limit of 0.125 GB"
    assert result["peak_rss_mb"] > 128


def test_a_crash_is_told_from_a_limit(tmp_path):
    result, _ = run_python("raise ValueError('no such layer')", tmp_path)
    assert result["error"] == "exit code 1: ValueError: no such layer"
    result, _ = run_python("import os; os.abort()", tmp_path)
    assert result["error"].startswith("exit code -6")
    result, _ = run_python("print('no json')", tmp_path)
    assert result["error"].startswith("exit code 0")


def bench(tmp_path, *arguments):
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.run",
            "--models=cnn",
            "--batch_size=4",
            "--steps=2",
            "--repeats=1",
            f"--output_dir={tmp_path}",
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def small_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return folder, bench(folder, "--microbatch_size=2")


def test_a_run_measures_plain_and_private(small_run):
    folder, output = small_run
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [(r["library"], r["mode"], r["microbatch_size"]) for r in lines] == [
        ("keras", "plain", None),
        ("keras_dp", "auto", 2),
    ]
    for record in lines:
        assert "error" not in record
        assert record["batch_size"] == 4
        assert record["timed_steps"] == 1
        assert record["parameters"] == 26_010
        assert record["first_step_s"] > 0 < record["step_s"]
        assert record["peak_rss_mb"] > 100
    assert "| cnn | 4 by 2 |" in output
    assert output.rstrip().endswith((folder / "results.md").read_text().rstrip())
    assert (folder / "chart.svg").read_text().startswith("<?xml")


def test_a_run_goes_on_where_it_was(small_run):
    folder, _ = small_run
    before = (folder / "results.jsonl").read_text()
    (folder / "results.md").unlink()
    for flags in (["--resume", "--microbatch_size=2"], ["--table_only"]):
        assert "| cnn | 4 by 2 |" in bench(folder, *flags)
        assert (folder / "results.jsonl").read_text() == before
    assert (folder / "results.md").exists()


def test_a_limit_is_a_result_and_not_tried_again(tmp_path):
    output = bench(tmp_path, "--time_limit_s=0.1", "--repeats=2")
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [record["error"] for record in lines] == ["over the limit of 0.1 s"] * 2
    assert "| cnn | 4 | over the limit of 0.1 s |" in output


@pytest.mark.parametrize("flag", ["--models=nothing", "--backends=fast", "--jit_compile=maybe"])
def test_unknown_names_are_refused(flag):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.run", flag], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "must be among" in done.stderr
