"""What is compiled for TPUs, what is found wrong with it, and the tables; without a compiler."""

import dataclasses
import json

import pytest
from packaging.requirements import Requirement

from benchmarks.tpu import cases, report, run
from benchmarks.zoo import OWN

GOOD = {
    "parameters": 26010,
    "replicas": 8,
    "hosts": 2,
    "collectives": {"all-reduce": 1},
    "sent_bytes": 104040.0,
    "summed_elements": 26010,
    "host_calls": [],
    "generators": ["philox"],
    "precisions": {"default": 3},
    "arguments_bytes": 10,
    "temporary_bytes": 20,
    "code_bytes": 30,
    "flops": 1e9,
    "bytes_accessed": 2e9,
    "lower_s": 1.0,
    "compile_s": 2.0,
}


def test_versions_are_pinned():
    lines = [line for line in run.REQUIREMENTS.read_text().splitlines() if line[0] != "#"]
    found = {r.name: [s.operator for s in r.specifier] for r in map(Requirement, lines)}
    assert {"tensorflow-cpu", "keras", "jax", "libtpu", "dp-accounting"} <= set(found)
    assert all(operators == ["=="] for operators in found.values())


def test_each_varies_while_the_others_stand_still():
    plan = cases.plan()
    for topology in (cases.SMALL, cases.POD):
        here = [case for case in plan if case.topology == topology and case.private]
        assert {case.model for case in here if not case.control} == set(OWN)
        assert {case.optimizer for case in here if case.model == cases.MODEL} == set(
            cases.OPTIMIZERS
        )
    assert {case.topology for case in plan} == set(cases.TOPOLOGIES)
    assert {case.control for case in plan} == {None, *cases.CONTROLS} == {None, *report.REFUSALS}
    assert len(set(plan)) == len(plan) == len({case.name for case in plan})
    plain = {case.model for case in plan if not case.private}
    assert plain == set(OWN)


def test_flags_name_what_is_compiled():
    only = cases.plan(["mlp"], ["DPLamb"], ["v4:2x2x1"], ())
    assert {case.topology for case in only} <= {"v4:2x2x1", cases.SMALL, cases.POD}
    case = cases.Case("mlp", private=False, batch_size=4)
    assert {"--model=mlp", "--private=False", "--batch_size=4"} < set(case.flags)
    assert not any(flag.startswith(("--replicas", "--control")) for flag in case.flags)
    assert "--private=True" in cases.Case().flags


@pytest.mark.parametrize(
    "change, said",
    [
        ({}, ""),
        ({"collectives": {"all-reduce": 2}}, "collectives {'all-reduce': 2}"),
        ({"collectives": {"all-reduce": 1, "all-gather": 1}}, "all-gather"),
        ({"collectives": {}}, "collectives {}"),
        ({"summed_elements": 26011}, "sums 26011 numbers of 26010 weights"),
        ({"host_calls": ["outfeed"]}, "calls its host"),
        ({"generators": []}, "random bits by []"),
        ({"generators": ["philox", "threefry"]}, "random bits by"),
        ({"error": "exit code -6"}, "exit code -6"),
        ({"refused": "no kernel"}, "no kernel"),
    ],
    ids=str,
)
def test_a_private_program_that_is_wrong_is_told(change, said):
    found = report.verdict(cases.Case(), GOOD | change)
    assert said in found
    assert bool(found) is bool(said)


def test_noise_off_and_one_replica():
    quiet = cases.Case(noise_multiplier=0.0, replicas=1)
    alone = {"replicas": 1, "collectives": {}, "summed_elements": 0, "generators": []}
    assert report.verdict(quiet, GOOD | alone) == ""
    assert "philox" in report.verdict(quiet, GOOD | alone | {"generators": ["philox"]})
    assert "sends" in report.verdict(quiet, GOOD | alone | {"collectives": {"all-reduce": 1}})


def test_a_plain_program_may_send_more():
    record = GOOD | {"collectives": {"all-reduce": 2}, "generators": []}
    assert report.verdict(cases.Case(private=False), record) == ""


@pytest.mark.parametrize("control", cases.CONTROLS)
def test_a_control_must_be_refused_for_its_own_reason(control):
    case = cases.Case(control=control)
    assert report.verdict(case, {"refused": f"x {report.REFUSALS[control]} y"}) == ""
    assert "not for" in report.verdict(case, {"refused": "something else"})
    assert "should not" in report.verdict(case, GOOD)
    assert report.verdict(case, {"error": "exit code 1"}) == "exit code 1"


def test_results_are_kept_and_shown(tmp_path):
    results = cases.Results(tmp_path / "results.jsonl")
    plain = dataclasses.replace(cases.Case(), private=False)
    control = cases.Case(control="too_large")
    cost = cases.cost_plan()[0]
    results.add(cases.Case(), {"error": "exit code 1"})
    for case in (cases.Case(), plain, cost):
        results.add(case, GOOD)
    results.add(control, {"refused": "RESOURCE_EXHAUSTED: a | b"})
    again = cases.Results(tmp_path / "results.jsonl")
    assert again.get(cases.Case()) == json.loads(json.dumps(GOOD))
    assert cases.Case("lstm") not in again
    text = report.tables_of(again)
    assert "| cnn, 256 | DPAdam | v5e:2x4 | 8, 2 | 1 all-reduce, 0.1 MB |" in text
    assert "| too_large | RESOURCE_EXHAUSTED: a / b |" in text
    assert "exit code" not in text
    assert all(
        line.count("|") == block.splitlines()[0].count("|")
        for block in text.split("\n\n")
        for line in block.splitlines()
    )
