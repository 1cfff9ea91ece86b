"""Several processes that train together: one update, one account, one secret.

``several_cases.py`` runs in each of the workers; here is what has to have come out.
"""

import keras
import numpy as np
import pytest
from scipy.stats import binom

import keras_dp
from keras_dp.accounting import Phase, epsilon_of_phases
from keras_dp.padding import PADDING_WEIGHT
from tests.distribution.cluster import Cluster
from tests.distribution.witness import LOSSES, examples, witnessed

DELTA = 1e-5
# Ways to train, with the optimizer that one process has to have for the same.
WAYS = {"pieces": {}}
MORE_WAYS = {
    "compiled": {},
    "plain": {},
    "microbatches": {},
    "adagrad": {"optimizer": keras_dp.make_private(keras.optimizers.Adagrad)},
    "full": {"batch_size": 41},
}
CASES = [
    "said_by_the_chief", "without_noise", "many_draws", "accumulated",
    "with_noise", "budget", "broken_ledger", "refused", "state_of_the_chief",
    "plain_keras",
]  # fmt: skip
TRAININGS = [
    *WAYS, "many draws", "accumulated", "noise", "budget", "stopped", "resumed",
]  # fmt: skip


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two workers found in all cases."""
    return Cluster("several_cases", tmp_path_factory.mktemp("two"), 2, *CASES).found()


def _weights_of_one_process(found, n, optimizer=keras_dp.DPSGD, rate=0.5, batch_size=10):
    """The weights after the same updates, of the same examples each, in this process."""
    (x, one_hot), (y, ones) = examples(n)
    model = witnessed(n)
    for variable, value in zip(model.trainable_variables, found["before"]):
        variable.assign(value)
    dp = optimizer(rate, l2_norm_clip=1.0, noise_multiplier=0.0, batch_size=batch_size)
    model.compile(dp, LOSSES)
    for present in found["present"]:
        rows, weight = np.zeros(n + 1, int), np.full(n + 1, PADDING_WEIGHT, np.float32)
        rows[: present.sum()], weight[: present.sum()] = np.flatnonzero(present), 1
        model.train_on_batch([x[rows], one_hot[rows]], [y[rows], ones[rows]], weight)
    return [v.numpy() for v in model.trainable_variables]


@pytest.mark.filterwarnings("ignore:keras_dp")
@pytest.mark.parametrize("way", WAYS)
def test_without_noise_it_is_one_process_on_the_union_of_the_draws(two, way):
    found = two[0][way]
    assert found["updates"] == len(found["present"]) > 0
    expected = _weights_of_one_process(found, 41, **WAYS[way])
    for after, weights in zip(found["after"], expected):
        np.testing.assert_allclose(after, weights, rtol=0, atol=1e-5)


@pytest.mark.filterwarnings("ignore:keras_dp")
def test_batches_that_the_user_has_shared_out_add_up(two):
    found = two[0]["accumulated"]
    assert found["updates"] == len(found["present"]) == 4
    expected = _weights_of_one_process(found, 40, batch_size=20)
    for after, weights in zip(found["after"], expected):
        np.testing.assert_allclose(after, weights, rtol=0, atol=1e-5)
    # Each epoch is one pass over all examples, in two updates.
    first, second = found["present"][:2]
    np.testing.assert_array_equal(first.astype(int) + second, 1)


@pytest.mark.parametrize("training", TRAININGS)
def test_workers_have_the_same_bits_and_numbers(two, training):
    one, other = two[0][training], two[1][training]
    assert one["state"] == other["state"]
    assert one["updates"] == other["updates"]
    assert one["history"] == other["history"]


def test_updates_are_as_many_as_the_epochs_have(two):
    found = two[0]
    for training in (*WAYS, "noise", "stopped"):
        assert found[training]["updates"] == 2 * 5  # ceil(41 / 10)


@pytest.mark.filterwarnings("ignore:keras_dp")
def test_a_worker_without_examples_takes_part(two):
    found = two[0]["many draws"]
    for worker in (0, 1):
        assert not found["present"][:, worker::2].any(axis=1).all()  # it had nobody in some
    expected = _weights_of_one_process(found, 20, batch_size=3)
    for after, weights in zip(found["after"], expected):
        np.testing.assert_allclose(after, weights, rtol=0, atol=1e-5)


def test_the_union_of_the_draws_is_poisson(two):
    """Each example with probability q, independently of all others, on one seed for both."""
    present, q = two[0]["many draws"]["present"], 3 / 20
    draws, n = present.shape
    assert (draws, n) == (200, 20)
    low, high = binom.ppf([1e-7, 1 - 1e-7], draws, q)
    assert np.all((present.sum(0) >= low) & (present.sum(0) <= high))
    low, high = binom.ppf([1e-7, 1 - 1e-7], draws * n, q)
    assert low <= present.sum() <= high
    correlation = np.corrcoef(present.T.astype(float)) - np.eye(n)
    assert np.abs(correlation).max() < 6 / np.sqrt(draws)
    sizes = present.sum(1)
    assert abs(sizes.var() / (n * q * (1 - q)) - 1) < 6 * np.sqrt(2 / draws)


def test_the_secret_is_one_and_in_no_file(two):
    one, other = two[0]["noise"], two[1]["noise"]
    assert one["secret"] == other["secret"]
    assert one["run"] == other["run"]
    assert min(one["written"], other["written"]) >= 4
    assert one["leaks"] == other["leaks"] == []


def test_epsilon_is_the_same_and_counted_once(two):
    phase = Phase(
        num_examples=41, batch_size=10, noise_multiplier=1.0, sampling="poisson", steps=10
    )
    for found in (worker["noise"] for worker in two):
        assert found["steps"] == found["updates"] == 10
        assert found["epsilon"] == epsilon_of_phases([phase], DELTA)
        assert found["history"]["epsilon"][-1] == found["epsilon"]
        assert found["entries"] == 1


def test_the_chief_alone_writes_the_ledger_and_the_statement(two):
    assert two[0]["noise"]["ledger"]
    assert not two[1]["noise"]["ledger"]
    assert "epsilon" in two[0]["noise"]["printed"]
    assert two[1]["noise"]["printed"] == ""


def _updates_within(max_epsilon, spent):
    """How many updates beside ``spent`` the budget holds, by trying one more each time."""
    steps = spent
    while True:
        phase = Phase(
            num_examples=41, batch_size=10, noise_multiplier=1.0, sampling="poisson",
            steps=steps + 1,
        )  # fmt: skip
        if epsilon_of_phases([phase], DELTA) > max_epsilon:
            return steps - spent
        steps += 1


def test_a_budget_stops_all_by_what_the_chief_knows(two):
    allowed = _updates_within(12.0, spent=30)
    for found in (worker["budget"] for worker in two):
        assert found["updates"] == allowed > 5
        assert found["steps"] == allowed + 30
        assert found["epsilon"] <= 12.0
        kind, text = found["again"]
        assert kind == "BudgetExceededError"
        assert "no update is left" in text
    assert two[0]["budget"]["again"] == two[1]["budget"]["again"]
    assert "training stopped" in two[0]["budget"]["printed"]
    assert two[1]["budget"]["printed"] == ""
    assert two[1]["budget"]["files"] == []
    assert two[0]["budget"]["left"] == 0
    assert "Ask on the chief" in two[1]["budget"]["left"][1]


def test_what_only_the_chief_can_find_out(two):
    assert two[0]["broken ledger"][0] == "LedgerError"
    kind, text = two[1]["broken ledger"]
    assert kind == "PrivacyError"
    assert "The chief of the workers cannot go on: LedgerError: The ledger" in text


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("arrays", "PoissonSampler"),
        ("fixed", "received a FixedBatches on 2 workers"),
        ("generator", "once for each of them"),
        ("tf.data", "distribute_datasets_from_function"),
        ("auto-sharded", "distribute_datasets_from_function"),
        ("as_tf_dataset", "once for each of them"),
        ("drawn by each", "parts of one draw"),
        ("poisson by word", "parts of one draw"),
        ("train_on_batch", "the noise would be too small"),
        ("epochs", "What differs: epochs"),
        ("batch size", "What differs: the optimizer"),
        ("logger on the chief only", "What differs: the callbacks that account"),
        ("delta", "What differs: the callbacks that account"),
    ],
)
def test_refused_on_all_workers(two, what, text):
    for found in two:
        kind, said = found["refused"][what]
        assert kind == "PrivacyError"
        assert text in said
        assert found["untouched"]


def test_all_go_on_from_the_state_of_the_chief(two):
    """Of which only the chief had a checkpoint; the others' weights were other ones."""
    for found in two:
        resumed = found["resumed"]
        assert resumed["updates"] == 3 * 5
        assert len(resumed["present"]) == 5  # one epoch was left
        fresh, after = resumed["run"]
        assert fresh != after  # the run goes on that the checkpoint is of
    assert two[0]["resumed"]["run"] == two[1]["resumed"]["run"]


def test_what_the_chief_says(two):
    for worker, found in enumerate(two):
        assert found["heard"] == [None, 0.1, [1, "é"], "x" * 100_001, 0]
        assert found["failed"] == [("Wrong", "no room"), (
            "PrivacyError", "The chief of the workers cannot go on: Wrong: no room"
        )][worker]  # fmt: skip
        assert found["bytes"] == bytes(range(256))
        assert found["total"] == [2, 1]


@pytest.mark.parametrize("name", ["reduce_per_replica", "_maybe_symbolic_build"])
def test_keras_cannot_do_it_by_itself_yet(two, name):
    assert two[0]["plain Keras"][name] is not None, (
        f"Keras {keras.__version__} trains on several workers without what "
        f"keras_dp/distribution/trainer.py does to {name}: remove it."
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:keras_dp")
@pytest.mark.parametrize(("workers", "cpus"), [(3, 1), (2, 2)])
def test_more_workers_and_several_replicas_in_each(tmp_path, workers, cpus):
    cases = ["said_by_the_chief", "without_noise", "with_noise", "budget"]
    ways = WAYS
    if cpus > 1:
        cases += ["more_without_noise", "several_per_execution"]
        ways = WAYS | MORE_WAYS
    found = Cluster("several_cases", tmp_path, workers, *cases, cpus=cpus).found()
    chief = found[0]
    trainings = [
        training
        for training in chief
        if isinstance(chief[training], dict) and "state" in chief[training]
    ]
    assert {*ways, "noise", "budget"} <= set(trainings)
    assert all(chief[way]["updates"] == 10 for way in ways if way != "full")
    if cpus > 1:
        assert chief["two at a time"]["updates"] == 10
    for training in trainings:
        for other in found[1:]:
            assert other[training]["state"] == chief[training]["state"], training
            assert other[training]["history"] == chief[training]["history"], training
        assert not any(each[training]["replicas"] for each in found), training
    for way, options in ways.items():
        expected = _weights_of_one_process(chief[way], 41, **options)
        for after, weights in zip(chief[way]["after"], expected):
            np.testing.assert_allclose(after, weights, rtol=0, atol=1e-5, err_msg=way)
    assert chief["budget"]["updates"] == _updates_within(12.0, spent=30)
    assert [each["noise"]["ledger"] for each in found] == [True] + [False] * (workers - 1)
    assert {each["noise"]["secret"] for each in found} == {chief["noise"]["secret"]}
    assert all(each["total"] == [workers, sum(range(workers))] for each in found)
