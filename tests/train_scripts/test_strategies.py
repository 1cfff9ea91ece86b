"""The flags that say on which devices a program trains."""

import json
import os
import subprocess
import sys

import pytest
import tensorflow as tf
from absl import flags

from tests.distribution.cluster import ROOT, free_ports
from train_scripts import strategies


def parsed(*arguments):
    values = flags.FlagValues()
    strategies.define_flags(values)
    values(["program", *arguments])
    return values


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


def test_one_device_by_default():
    assert strategies.from_flags(parsed()) is tf.distribute.get_strategy()
    assert strategies.from_flags(parsed("--num_replicas=1")) is tf.distribute.get_strategy()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--num_replicas=2"], "--strategy=default has 1 here"),
        (["--task_index=0"], "are for --strategy=multi_worker"),
        (["--strategy=mirrored", "--worker_hosts=a:1"], "are for --strategy=multi_worker"),
        (["--strategy=multi_worker"], "TF_CONFIG"),
        (["--strategy=multi_worker", "--worker_hosts=a:1,b:2"], "go together"),
        (["--strategy=multi_worker", "--task_index=1"], "go together"),
        (
            ["--strategy=multi_worker", "--worker_hosts=a:1,b:2", "--task_index=2"],
            "'index' is not from 0 to 1",
        ),
        (["--strategy=multi_worker", "--worker_hosts=a", "--task_index=0"], "no list of addresses"),
    ],
)
def test_what_does_not_fit_is_refused(monkeypatch, arguments, text):
    monkeypatch.setenv("TF_CONFIG", "")  # which is put back, whatever the flags set
    with pytest.raises(ValueError, match=text):
        strategies.from_flags(parsed(*arguments))


def test_a_cluster_is_described_once(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    values = parsed("--strategy=multi_worker", "--worker_hosts=a:1", "--task_index=0")
    with pytest.raises(ValueError, match="TF_CONFIG describes the workers already"):
        strategies.from_flags(values)


@pytest.mark.parametrize("name", ["mirrored", "multi_worker"])
def test_a_program_gets_its_strategy(name):
    """In a process of its own, since devices are made before TensorFlow is used."""
    arguments = {
        "mirrored": ["--num_replicas=3"],
        "multi_worker": [f"--worker_hosts=127.0.0.1:{free_ports(1)[0]}", "--task_index=0"],
    }[name]
    program = (
        "import json, os, sys\n"
        "from absl import flags\n"
        "from train_scripts import strategies\n"
        "strategies.define_flags()\n"
        "flags.FLAGS(sys.argv)\n"
        "s = strategies.from_flags()\n"
        "config = os.environ.get('TF_CONFIG', 'null')\n"
        "print(json.dumps([type(s).__name__, s.num_replicas_in_sync, json.loads(config)]))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", program, f"--strategy={name}", *arguments],
        cwd=ROOT, env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    kind, replicas, config = json.loads(process.stdout)
    if name == "mirrored":
        assert (kind, replicas, config) == ("MirroredStrategy", 3, None)
    else:
        assert kind == "CollectiveAllReduceStrategy"
        assert config["task"] == {"type": "worker", "index": 0}
        assert len(config["cluster"]["worker"]) == 1
