"""A worker that dies ends the others; all go on from the last backup, with all that was spent."""

import pickle

import pytest

from keras_dp import PrivacyLedger
from keras_dp.accounting import Phase, epsilon_of_phases
from tests.distribution.cluster import Cluster


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_dies_and_all_start_again(tmp_path, victim):
    killed = Cluster("restart_case", tmp_path / "killed", 2, str(victim))
    codes = killed.wait(timeout=90)  # TensorFlow needs about ten seconds to notice
    assert codes[victim] == -9
    assert codes[1 - victim] > 0
    survivor = pickle.loads((tmp_path / "killed" / f"{1 - victim}.pickle").read_bytes())
    assert survivor["error"][0] == "UnavailableError"
    on_file = PrivacyLedger(tmp_path / "disk0").steps
    assert on_file >= 10  # none was made that was not written before

    resumed = Cluster("restart_case", tmp_path / "resumed", 2, "nobody").found(timeout=90)
    total = on_file + 20 - 8  # the backup is of the end of the second epoch
    phase = Phase(
        num_examples=40, batch_size=10, noise_multiplier=1.0, sampling="poisson", steps=total
    )
    for found in resumed:
        assert found["updates"] == 20
        assert found["run"] == survivor["run"]
        assert found["steps"] == total
        assert found["epsilon"] == epsilon_of_phases([phase], 1e-5)
        assert found["state"] == resumed[0]["state"]
        assert found["secret"] == resumed[0]["secret"] != survivor["secret"]
    assert not (tmp_path / "disk1").exists()


@pytest.mark.slow
def test_the_program_on_the_page(tmp_path):
    chief, other = Cluster("page_case", tmp_path, 2).found(timeout=90)
    assert chief["updates"] == other["updates"] == 10 * 2
    assert chief["weights"] == other["weights"]
    assert chief["epsilon"] == other["epsilon"] > 0
    assert "privacy_ledger.json" in chief["files"]
    assert other["files"] == []
