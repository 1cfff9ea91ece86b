"""Private steps compiled by the TPU compiler, in the environment of ``make bench-tpu-install``.

A subset of ``make bench-tpu``: every kind of layer and every optimizer with the small models, both
sizes of a pod, every generation of the chip, and the programs that must be refused.
"""

import pathlib

import pytest

from benchmarks.tpu import cases, report, run

PYTHON = pathlib.Path(run.__file__).parents[2] / ".venvs" / "tpu" / "bin" / "python"
SUBSET = [
    cases.Case("cnn", "DPLamb"),
    cases.Case("cnn", "DPMomentum", cases.POD),
    cases.Case("mlp", "DPAdam", "v6e:2x4"),
    cases.Case("lstm", "DPAdamW", "v5p:2x2x1"),
    cases.Case("cnn", "DPSGD", "v4:2x2x1"),
]
pytestmark = pytest.mark.tpu


def compiled(case, folder):
    assert PYTHON.exists(), "run `make bench-tpu-install` first"
    return run.compile_case(case, PYTHON, folder, seconds=240)


@pytest.mark.parametrize("case", SUBSET, ids=lambda case: case.name)
def test_a_private_step_is_as_it_should_be(case, tmp_path):
    record = compiled(case, tmp_path)
    assert report.verdict(case, record) == ""
    assert record["temporary_bytes"] > 0
    assert record["flops"] > 0


@pytest.mark.parametrize("control", cases.CONTROLS)
def test_what_cannot_run_is_refused(control, tmp_path):
    case = cases.Case(optimizer="DPSGD", control=control)
    assert report.verdict(case, compiled(case, tmp_path)) == ""
