"""The cost model against arithmetic by hand and against laws that any pod obeys."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import chart
from benchmarks.tpu import cases, cost

CHIP = cost.Chip(flops=100.0, vector_ops=10.0, bandwidth=20.0, memory=1.0, link_bandwidth=8.0)
WORK = cost.Work(
    parameters=5, row_flops=60.0, row_bytes=10.0, step_bytes=40.0, normal_ops=4.0, normal_bytes=2.0
)


def test_parts_by_hand():
    found = cost.step(WORK, CHIP, replicas=4, batch_size=9, reached=0.5)
    # 3 rows a replica; 60 / 50 s of operations, more than the 10 / 20 s of bytes.
    assert found.compute == pytest.approx(3 * 1.2)
    # 2 x 3/4 of 20 bytes at 8 bytes a second, and 2 x 2 axes x 1 hop of a microsecond.
    assert found.all_reduce == pytest.approx(30 / 8 + 4e-6)
    assert found.noise == pytest.approx(4 * 5 / 10)
    assert found.update == pytest.approx(40 / 20)
    assert found.total == pytest.approx(3.6 + 3.75 + 4e-6 + 2 + 2)


def test_memory_can_be_what_bounds():
    slow = dataclasses.replace(WORK, row_bytes=100.0)
    assert cost.step(slow, CHIP, replicas=1, batch_size=2, reached=0.5).compute == 10.0


def test_noise_can_be_bound_by_memory_too():
    moved = dataclasses.replace(WORK, normal_bytes=16.0)
    assert cost.step(moved, CHIP, replicas=1, batch_size=1).noise == pytest.approx(5 * 16 / 20)


def test_one_replica_sends_nothing():
    assert cost.step(WORK, CHIP, replicas=1, batch_size=8).all_reduce == 0


@given(
    st.integers(0, 10).map(lambda n: 2**n),
    st.integers(1, 10**6),
    st.floats(0.01, 1),
    st.floats(1, 9),
)
def test_laws(replicas, batch_size, reached, factor):
    def found(work=WORK, chip=CHIP, **changed):
        arguments = {"replicas": replicas, "batch_size": batch_size, "reached": reached} | changed
        return cost.step(work, chip, **arguments)

    one = found()
    more = found(replicas=2 * replicas)
    assert more.compute <= one.compute
    assert one.all_reduce <= more.all_reduce
    assert (more.noise, more.update) == (one.noise, one.update)  # every replica does all of it
    assert found(batch_size=batch_size + 1).total >= one.total
    faster = dataclasses.replace(
        CHIP,
        flops=factor * CHIP.flops,
        vector_ops=factor * CHIP.vector_ops,
        bandwidth=factor * CHIP.bandwidth,
        link_bandwidth=factor * CHIP.link_bandwidth,
        hop_s=CHIP.hop_s / factor,
    )
    assert found(chip=faster).total == pytest.approx(one.total / factor)
    # No more than the wire allows: each byte of the sum is sent and received once.
    assert one.all_reduce <= 2 * 4 * WORK.parameters / CHIP.link_bandwidth + 4e-6 * replicas


def record(rows, noise=0.0, weight=1.0):
    return {
        "parameters": 10,
        "flops": weight * 7.0 * rows + noise,
        "bytes_accessed": weight * 30.0 * rows + 400 + noise / 7,
        "arguments_bytes": rows,
        "temporary_bytes": rows,
        "code_bytes": 5,
    }


def test_work_is_split_into_rows_and_update():
    found = cost.work(6, record(6), (4.0, 1.0))
    assert found == cost.Work(10, 7.0, 30.0, 400, 4.0, 1.0, memory=17)
    assert cost.work(1, record(1) | {"bytes_accessed": 300}).row_bytes == 0


def test_blocks_cost_alike():
    one, two = cost.Work(10, 7.0, 3.0, 50.0), cost.Work(14, 9.0, 4.0, 80.0)
    assert cost.deeper(one, two, 1) == one
    assert cost.deeper(one, two, 2) == two
    assert cost.deeper(one, two, 24) == cost.Work(10 + 23 * 4, 7 + 23 * 2, 3 + 23, 50 + 23 * 30)


@pytest.mark.parametrize(
    "wrong", [{"replicas": 0}, {"batch_size": 1.5}, {"reached": 0}, {"reached": 1.1}], ids=str
)
def test_impossible_steps_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be .* Received: {wrong[name]}"):
        cost.step(WORK, CHIP, **{"replicas": 1, "batch_size": 1} | wrong)


def test_a_run_has_whole_steps():
    seconds = cost.step(WORK, CHIP, replicas=2, batch_size=4).total
    hours = cost.run_hours(WORK, CHIP, replicas=2, batch_size=4, examples=9, epochs=5)
    assert hours == pytest.approx(5 * 3 * seconds / 3600)


def found(tmp_path, models):
    results = cases.Results(tmp_path / "results.jsonl")
    for case in cases.cost_plan(models):
        noise = 700.0 if case.private and case.noise_multiplier else 0.0
        results.add(case, record(case.batch_size or 1, noise, 2.0 if case.private else 1.0))
    return results


def test_the_table_of_a_run(tmp_path):
    results = found(tmp_path, ["resnet50"])
    private = cost.measured(results, "resnet50")
    plain = cost.measured(results, "resnet50", private=False)
    assert private.row_flops == 2 * plain.row_flops
    assert (private.normal_ops, private.normal_bytes) == (70.0, pytest.approx(10.0))  # 10 weights
    assert (plain.normal_ops, plain.normal_bytes) == (0.0, 0.0)
    assert cost.measured(results, "vit_l_1") is None
    assert cost.models_of(results) == {"resnet50": (private, plain)}
    lines = cost.rows("resnet50", private, plain)
    assert [line[1] for line in lines] == [str(n) for n in cost.REPLICAS]
    assert {len(line) for line in lines} == {len(cost.HEADER)}
    assert {len(line) for line in cost._figures("resnet50", private, plain)} == {len(cost.FIGURES)}


def test_a_vit_is_put_together_from_its_blocks(tmp_path):
    assert set(cost.models_of(found(tmp_path, ["vit_l_1", "vit_l_2"]))) == {"vit_l"}


def test_curves_are_drawn(tmp_path):
    path = tmp_path / "curves.svg"
    chart.curves(
        {"a, whole": ([1, 2], [2.0, 1.0]), "a, part": ([1, 2], [1, 1])}, path, "x", "y", "T"
    )
    assert path.read_text().startswith("<?xml")
    chart.curves({}, tmp_path / "none.svg", "x", "y", "T")
    assert not (tmp_path / "none.svg").exists()
