"""The benchmark of the sampler, on little work."""

import json

import pytest

from benchmarks import sampling


def test_the_law_is_found_and_a_wrong_one_would_show():
    rows = {row["what"]: row for row in sampling.law(number=4000)}
    assert rows["one example drawn"]["numbers"] == 10
    assert all(row["worst_z"] < 5 for row in rows.values())
    assert rows["variance of the size"]["expected"] == pytest.approx(2.1)


def test_tables_of_every_part(tmp_path):
    results = {
        "law": sampling.law(number=100),
        "cost of a draw": sampling.costs(),
        "sources": sampling.throughput(tmp_path, n=640, batch_size=64),
        "waiting for input": sampling.waiting(["cnn"], steps=1),
    }
    json.dumps(results)
    text = sampling.text(results)
    for words in ("100,000,000", "array_record folder", "map_fn with rng"):
        assert words in text
    memory = {(row["N"], row["batch_size"]): row["peak_mb"] for row in results["cost of a draw"]}
    assert memory[10**8, 4096] < 1.2 * memory[10**6, 4096]  # bytes, not seconds
