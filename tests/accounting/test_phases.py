"""Phases: what may be said, what is refused, and that nothing is lost on paper."""

import dataclasses
import json
import math
import re

import dp_accounting
import pytest
from dp_accounting import pld as dp_accounting_pld
from dp_accounting import rdp as dp_accounting_rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_dp.accounting import Phase, common_relation, epsilon_of_phases, steps_per_epoch
from keras_dp.accounting.phases import NEIGHBORING_RELATIONS, RELATIONS, SAMPLINGS
from tests.accounting.runs import HAS_TRUNCATION, needs_truncation

RUN = {"num_examples": 1000, "batch_size": 100, "noise_multiplier": 2.0, "steps": 15}


@pytest.fixture(autouse=True)
def _fresh_keras():
    """Nothing of Keras is used here, and clearing its session takes longer than the tests."""


def test_the_relation_of_each_sampling():
    full = RUN | {"batch_size": 1000}
    found = {s: Phase(sampling=s, **full).neighboring_relation for s in SAMPLINGS}
    assert found == {
        "poisson": "add_remove",
        "shuffle": "zero_out",
        "without_replacement": "replace_one",
        "full_batch": "add_remove",
    }


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("relation", NEIGHBORING_RELATIONS)
def test_relations_under_which_nothing_is_known_are_refused(sampling, relation):
    run = RUN | {"batch_size": 1000, "sampling": sampling, "neighboring_relation": relation}
    if relation in RELATIONS[sampling]:
        assert epsilon_of_phases([Phase(**run)], 1e-5) > 0
    else:
        with pytest.raises(ValueError, match=f"{relation}.*{sampling}.*Pass '"):
            Phase(**run)


def test_replacing_an_example_doubles_the_sensitivity():
    for sampling in ("shuffle", "full_batch"):
        run = RUN | {"batch_size": 1000, "sampling": sampling}
        replaced = Phase(**run, neighboring_relation="replace_one")
        half = Phase(**(run | {"noise_multiplier": 1.0}))
        for accountant in ("rdp", "pld"):
            expected = epsilon_of_phases([half], 1e-5, accountant)
            found = epsilon_of_phases([replaced], 1e-5, accountant)
            assert found == pytest.approx(expected, rel=1e-3)


def test_replacing_an_example_of_a_poisson_draw_costs_more_than_removing_it():
    for sigma in (0.1, 1.0, 20.0):
        run = RUN | {"noise_multiplier": sigma}
        removed, replaced = Phase(**run), Phase(**run, neighboring_relation="replace_one")
        by_rdp = [epsilon_of_phases([p], 1e-5) for p in (removed, replaced)]
        by_pld = [epsilon_of_phases([p], 1e-5, "pld") for p in (removed, replaced)]
        assert by_rdp[0] < by_rdp[1] and by_pld[0] < by_pld[1]
        assert by_pld[1] <= by_rdp[1]


def test_shuffled_epochs_count_as_often_as_a_unit_can_be_in_an_update():
    shuffled = Phase(sampling="shuffle", **RUN)  # 10 updates an epoch
    assert shuffled.releases == shuffled.passes == 2
    assert dataclasses.replace(shuffled, epochs_begun=4).releases == 4
    assert dataclasses.replace(shuffled, epochs_begun=1).releases == 2  # cannot be so few
    twice = dataclasses.replace(shuffled, epochs_begun=3, participations_per_update=2)
    assert twice.releases == 6
    # One update holds a unit at most twice: that is 4 releases however many epochs were begun.
    assert dataclasses.replace(twice, steps=1, epochs_begun=3).releases == 4
    assert dataclasses.replace(twice, steps=0, epochs_begun=3).releases == 0


def test_spanning_updates_need_the_epochs_and_shuffled_batches():
    with pytest.raises(ValueError, match="participations_per_update=2 needs epochs_begun"):
        Phase(sampling="shuffle", participations_per_update=2, **RUN)
    with pytest.raises(ValueError, match="participations_per_update=2 with sampling='poisson'"):
        Phase(participations_per_update=2, **RUN)


@needs_truncation
def test_a_capacity_that_no_draw_exceeds_changes_nothing():
    plain, capped = Phase(**RUN), Phase(capacity=1000, **RUN)
    assert plain.release == capped.release
    assert epsilon_of_phases([Phase(capacity=300, **RUN)], 1e-5) == pytest.approx(
        epsilon_of_phases([plain], 1e-5), rel=1e-9
    )


@needs_truncation
def test_truncated_draws_by_both_accountants():
    run = RUN | {"noise_multiplier": 6.0}  # PLD is quick there
    plain = {a: epsilon_of_phases([Phase(**run)], 1e-5, a) for a in ("rdp", "pld")}
    for relation in ("add_remove", "replace_one"):
        for capacity in (130, 100):
            capped = Phase(capacity=capacity, neighboring_relation=relation, **run)
            by_rdp, by_pld = (epsilon_of_phases([capped], 1e-5, a) for a in ("rdp", "pld"))
            assert plain["rdp"] < by_rdp and plain["pld"] < by_pld
            reference = dp_accounting_pld.PLDAccountant(
                dp_accounting.NeighboringRelation.REPLACE_ONE
                if relation == "replace_one"
                else dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
            ).compose(capped.event)
            # dp-accounting takes a unit that displaces another for one that is replaced, which is
            # loose under add_remove: where draws are often cut, RDP is tighter.
            expected = min(reference.get_epsilon(1e-5), by_rdp)
            assert by_pld == pytest.approx(expected, rel=2e-3)


@needs_truncation
def test_truncated_draws_of_null_examples_are_refused():
    with pytest.raises(ValueError, match="zero_out.*capacity=120.*'add_remove' or 'replace_one'"):
        Phase(capacity=120, neighboring_relation="zero_out", **RUN)


def test_truncation_is_refused_where_dp_accounting_does_not_know_it(monkeypatch):
    monkeypatch.delattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent", raising=HAS_TRUNCATION)
    with pytest.raises(ValueError, match="capacity=120 cuts some draws.*dp-accounting 0.6.0"):
        Phase(capacity=120, **RUN)


def test_sampling_without_replacement_equals_dp_accounting():
    phase = Phase(sampling="without_replacement", **RUN)
    event = dp_accounting.SampledWithoutReplacementDpEvent(
        1000,
        100,
        dp_accounting.GaussianDpEvent(1.0),  # 2.0 over a sensitivity of 2
    )
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = dp_accounting_rdp.RdpAccountant(neighboring_relation=relation)
    expected = accountant.compose(event, 15).get_epsilon(1e-5)
    found = epsilon_of_phases([phase], 1e-5)
    assert expected * 0.9 < found <= expected * (1 + 1e-9)
    assert epsilon_of_phases([phase], 1e-5, "pld") == found  # dp-accounting has no PLD of it
    unsampled = Phase(
        sampling="full_batch", neighboring_relation="replace_one", **(RUN | {"batch_size": 1000})
    )
    assert found < epsilon_of_phases([unsampled], 1e-5)


def test_events_are_what_dp_accounting_reads():
    for sampling in ("poisson", "shuffle"):
        phase = Phase(sampling=sampling, **RUN)
        expected = dp_accounting_rdp.RdpAccountant().compose(phase.event).get_epsilon(1e-5)
        assert epsilon_of_phases([phase], 1e-5) == pytest.approx(expected, rel=1e-3)
    nothing = Phase(**(RUN | {"steps": 0})).event
    assert isinstance(nothing, dp_accounting.NoOpDpEvent)


def test_relations_of_several_phases():
    poisson, shuffled = Phase(**RUN), Phase(sampling="shuffle", **RUN)
    replaced = Phase(sampling="without_replacement", **RUN)
    assert common_relation([]) == "add_remove"
    assert common_relation([poisson, poisson]) == "add_remove"
    assert common_relation([poisson, shuffled]) == "zero_out"
    for phases in ([poisson, replaced], [shuffled, replaced]):
        with pytest.raises(ValueError, match='neighboring_relation="replace_one" for each'):
            common_relation(phases)
        everywhere = [dataclasses.replace(p, neighboring_relation="replace_one") for p in phases]
        assert common_relation(everywhere) == "replace_one"


@needs_truncation
def test_truncated_draws_share_no_relation_with_shuffled_batches():
    with pytest.raises(ValueError, match="different changes of the data"):
        common_relation([Phase(capacity=120, **RUN), Phase(sampling="shuffle", **RUN)])


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    num_examples=st.integers(1, 10**15),
    ratio=st.floats(0, 1),
    noise_multiplier=st.floats(0, 1e300),
    sampling=st.sampled_from(["poisson", "shuffle", "without_replacement"]),
    steps=st.integers(0, 10**30),
    unit=st.sampled_from(["example", "user"]),
)
def test_nothing_is_lost_in_json(num_examples, ratio, noise_multiplier, sampling, steps, unit):
    phase = Phase(
        num_examples=num_examples,
        batch_size=max(1, int(num_examples**ratio)),
        noise_multiplier=noise_multiplier,
        sampling=sampling,
        steps=steps,
        unit=unit,
        examples_per_user=3 if unit == "user" else None,
    )
    read = Phase.from_dict(json.loads(json.dumps(phase.to_dict(), allow_nan=False)))
    assert read == phase and hash(read) == hash(phase)


@pytest.mark.parametrize(
    "change",
    [
        {"steps": -1},
        {"noise_multiplier": math.nan},
        {"mechanism": "laplace"},
        {"more": 1},
        {"sampling": None},
        {"neighboring_relation": 3},
        {"unit": "household"},
    ],
)
def test_a_damaged_dict_is_refused(change):
    with pytest.raises(ValueError, match=re.escape(next(iter(change)))):
        Phase.from_dict(Phase(**RUN).to_dict() | change)
    missing = Phase(**RUN).to_dict()
    del missing["steps"]
    for values in (missing, None, [], "phase"):
        with pytest.raises(ValueError, match="A phase must be a dict with the keys"):
            Phase.from_dict(values)


BAD_COUNTS = [-1, 0, 0.5, math.nan, math.inf, True, "1", [1]]
BAD = [
    *[("capacity", value) for value in BAD_COUNTS],
    *[("participations_per_update", value) for value in [*BAD_COUNTS, None]],
    *[("examples_per_user", value) for value in [*BAD_COUNTS, 3]],
    *[("epochs_begun", value) for value in [-1, 1.0, math.nan, True, "1"]],
    *[("steps", value) for value in [-1, 1.0, math.nan, math.inf, True, "1", None]],
    *[("unit", value) for value in ["row", None, 1]],
    *[("neighboring_relation", value) for value in ["add", "replace", 1, ["add_remove"]]],
]


@pytest.mark.parametrize("name, value", BAD)
def test_bad_attributes(name, value):
    with pytest.raises(ValueError, match=rf"(?s){name}.*{re.escape(repr(value))}"):
        Phase(**(RUN | {name: value}))


@pytest.mark.parametrize("value", [*BAD_COUNTS, None, 1001])
def test_bad_sizes(value):
    with pytest.raises(ValueError, match=rf"(?s)batch_size.*{re.escape(repr(value))}"):
        steps_per_epoch(1000, value)
    if value != 1001:
        with pytest.raises(ValueError, match=rf"(?s)num_examples.*{re.escape(repr(value))}"):
            steps_per_epoch(value, 1)
