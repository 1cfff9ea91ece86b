"""TF_CONFIG, and who this process is in it."""

import json

import pytest
import tensorflow as tf

import keras_dp
from keras_dp.distribution import cluster
from keras_dp.distribution.data import _share

WORKERS = {"worker": ["a:1", "b:2"]}
FIRST = {"type": "worker", "index": 0}


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        (None, "it is not set"),
        ("{", "it is no JSON"),
        ([], "no object"),
        ({"task": FIRST}, "'cluster' is missing"),
        ({"cluster": [], "task": FIRST}, "'cluster' is missing"),
        ({"cluster": WORKERS}, "'task'"),
        ({"cluster": WORKERS, "task": {"type": "worker"}}, "'task'"),
        ({"cluster": WORKERS | {"ps": ["c:3"]}, "task": FIRST}, "the job 'ps' takes no part"),
        ({"cluster": {"worker": []}, "task": FIRST}, "no list of addresses"),
        ({"cluster": {"worker": "a:1"}, "task": FIRST}, "no list of addresses"),
        ({"cluster": {"worker": ["a", "b"]}, "task": FIRST}, "no list of addresses"),
        ({"cluster": {"worker": ["a:1", "a:1"]}, "task": FIRST}, "an address is there twice"),
        ({"cluster": WORKERS | {"chief": ["b:2"]}, "task": FIRST}, "an address is there twice"),
        ({"cluster": WORKERS | {"chief": ["c:1", "d:1"]}, "task": FIRST}, "more than one chief"),
        ({"cluster": WORKERS, "task": {"type": "chief", "index": 0}}, "'type' is none of"),
        ({"cluster": WORKERS, "task": {"type": "worker", "index": 2}}, "not from 0 to 1"),
        ({"cluster": WORKERS, "task": {"type": "worker", "index": "0"}}, "not from 0 to 1"),
        ({"cluster": WORKERS, "task": {"type": "worker", "index": True}}, "not from 0 to 1"),
    ],
)
def test_what_is_wrong_is_said(monkeypatch, config, fault):
    if config is None:
        monkeypatch.delenv("TF_CONFIG", raising=False)
    else:
        text = config if isinstance(config, str) else json.dumps(config)
        monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="needs the environment variable TF_CONFIG") as error:
        keras_dp.distribution.get_strategy("multi_worker")
    assert fault in str(error.value)


def test_it_has_to_come_first(monkeypatch):
    """This process has used TensorFlow already."""
    tf.zeros([]).numpy()
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": WORKERS, "task": FIRST}))
    with pytest.raises(RuntimeError, match="before anything else uses TensorFlow"):
        keras_dp.distribution.get_strategy("multi_worker")


class Stand(tf.distribute.MultiWorkerMirroredStrategy):
    """A strategy that knows its cluster and nothing else."""

    def __init__(self, jobs, kind, index, replicas):
        self.cluster_resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(jobs), task_type=kind, task_id=index
        )
        self.num_replicas_in_sync = replicas

    cluster_resolver = num_replicas_in_sync = None


@pytest.mark.parametrize(
    ("jobs", "kind", "index", "number"),
    [
        (WORKERS, "worker", 0, 0),
        (WORKERS, "worker", 1, 1),
        (WORKERS | {"chief": ["c:3"]}, "chief", 0, 0),
        (WORKERS | {"chief": ["c:3"]}, "worker", 0, 1),
        (WORKERS | {"chief": ["c:3"]}, "worker", 1, 2),
    ],
)
def test_each_task_has_a_number_and_one_is_the_chief(jobs, kind, index, number):
    workers = sum(map(len, jobs.values()))
    stand = Stand(jobs, kind, index, replicas=2 * workers)
    assert cluster.workers_of(stand) == workers
    assert cluster.worker_number(stand) == number
    assert keras_dp.distribution.is_chief(stand) == (number == 0)
    share = _share(stand)
    assert (share.worker, share.workers, share.replicas) == (number, workers, 2)


def test_one_process_is_its_own_chief():
    for strategy in (None, tf.distribute.get_strategy(), tf.distribute.OneDeviceStrategy("CPU:0")):
        assert keras_dp.distribution.is_chief(strategy)
        assert cluster.workers_of(strategy) == 1
        assert cluster.from_chief(strategy, lambda: {1: "as it is"}) == {1: "as it is"}
