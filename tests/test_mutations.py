"""The list of ways to break privacy stays in step with the code and with tests/README.md."""

import pathlib

import pytest

from tests.mutations import MUTATIONS, ROOT


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_the_code_and_the_test_are_there(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    path, _, test = mutation.test.partition("::")
    assert f"def {test}(" in (ROOT / path).read_text()


def test_the_readme_lists_them():
    text = (pathlib.Path(__file__).parent / "README.md").read_text()
    for mutation in MUTATIONS:
        assert f"| {mutation.name} | `{mutation.test}` |" in text


def test_names_differ():
    assert len({m.name for m in MUTATIONS}) == len(MUTATIONS) >= 10
