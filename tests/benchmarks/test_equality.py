"""The table of what several replicas change, on little work."""

import json

import numpy as np

from benchmarks import equality


def test_a_row_and_what_would_show():
    rows = equality.equality(["DPSGD"], ["layerwise"], [2])
    assert rows[0]["difference"][2] < 1e-5 and rows[0]["bits"][2]
    results = {"equality": rows, "noise": [{"replicas": 2, "entries": 1, "std_ratio": 1.0}]}
    json.dumps(results)
    assert "| DPSGD | layerwise |" in equality.text(results)
    model = equality.trained(2, "DPSGD", "layerwise", 0.0)
    copy = model.trainable_variables[0].value.values[1]
    copy.assign(copy + np.float32(1e-7))
    assert not equality.copies_agree(model)
    model.trainable_variables[0].assign(model.trainable_variables[0] * 1.01)
    assert equality.difference(model, equality.trained(0, "DPSGD", "layerwise", 0.0)) > 1e-3


def test_the_noise():
    for row in equality.noise([2]):
        assert abs(row["std_ratio"] - 1) < 0.003 and row["entries"] >= 1e6
