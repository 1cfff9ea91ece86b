"""Our epsilons against those of Opacus and TensorFlow Privacy, which `fixtures` has recorded.

Where they differ, and why:

* RDP: the three compute the same divergences and convert them by the same formula. Ours knows them
  at more orders and exactly at fractional ones, where dp-accounting, which TensorFlow Privacy
  uses, has an upper bound: ours is equal or smaller.
* PRV (Opacus) returns its estimate plus an allowed error of 0.01: ours is smaller by that.
* PLD (TensorFlow Privacy) is dp-accounting's on a grid of 1e-4. Ours is a grid of its own that is
  coarser where that is quicker: equal within 0.1 %, and also an upper bound.
"""

import json

import pytest

from keras_dp.accounting import compute_epsilon
from tests.fixtures.peer_accounting import FILE, SETTINGS

RECORDED = json.loads(FILE.read_text())


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def ours(name, accountant="rdp", sampling="poisson"):
    num_examples, batch_size, noise_multiplier, epochs, delta = SETTINGS[name]
    return compute_epsilon(
        num_examples=num_examples,
        batch_size=batch_size,
        noise_multiplier=noise_multiplier,
        epochs=epochs,
        delta=delta,
        accountant=accountant,
        sampling=sampling,
    )


def theirs(peer, name, accountant):
    return RECORDED[peer]["epsilons"][name][accountant]["epsilon"]


def test_versions_are_named():
    assert RECORDED["opacus"]["versions"]["opacus"] == "1.6.0"
    assert RECORDED["tensorflow_privacy"]["versions"]["tensorflow_privacy"] == "0.9.0"
    assert all(set(RECORDED[peer]["epsilons"]) == set(SETTINGS) for peer in RECORDED)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("peer", ["opacus", "tensorflow_privacy"])
def test_rdp(peer, name):
    peers = theirs(peer, name, "rdp")
    assert peers * (1 - 1e-3) <= ours(name) <= peers * (1 + 1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_rdp_without_amplification(name):
    peers = theirs("tensorflow_privacy", name, "rdp, no amplification")
    assert peers * (1 - 1e-3) <= ours(name, sampling="shuffle") <= peers * (1 + 1e-9)


@pytest.mark.parametrize("name", SETTINGS)
def test_pld_and_prv(name):
    found = ours(name, "pld")
    assert found == pytest.approx(theirs("tensorflow_privacy", name, "pld"), rel=1e-3)
    prv = theirs("opacus", name, "prv")
    assert prv - 0.0125 <= found < prv
