"""The other libraries' files, without the libraries: they need environments of their own."""

import ast
import pathlib

import pytest
from packaging.requirements import Requirement

from benchmarks.peers import environments, run
from benchmarks.zoo import COMPARED, OWN, ZOO

FOLDER = pathlib.Path(run.__file__).parent


def modes_of(library):
    """The MODES that the program of a library assigns."""
    for node in ast.parse((FOLDER / f"measure_{library}.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODES":
            return ast.literal_eval(node.value)
    raise AssertionError(f"measure_{library}.py has no MODES")


@pytest.mark.parametrize("library", environments.LIBRARIES)
def test_requirements_are_pinned(library):
    lines = (environments.REQUIREMENTS / f"{library}.txt").read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith("#")]
    assert all([s.operator for s in r.specifier] == ["=="] and r.url is None for r in found)
    names = {requirement.name.lower().replace("-", "_") for requirement in found}
    assert {library, "absl_py", "numpy"} <= names
    assert len(names) == len(found)


def test_every_way_has_a_program_that_knows_it():
    assert set(run.LIBRARIES) == {"keras", "keras_dp", *environments.LIBRARIES}
    for library in environments.LIBRARIES:
        assert set(modes_of(library)) == {mode for name, mode, *_ in run.WAYS if name == library}


@pytest.mark.parametrize("file", ["flax_models.py", "torch_models.py"])
def test_every_compared_model_is_there(file):
    tree = ast.parse((FOLDER / file).read_text())
    strings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert set(COMPARED) <= strings


def test_an_environment_that_is_there_is_not_made_again(tmp_path):
    (tmp_path / "opacus").mkdir()
    stamp = tmp_path / "opacus" / "installed.txt"
    stamp.write_text((environments.REQUIREMENTS / "opacus.txt").read_text())
    expected = tmp_path / "opacus" / "bin" / "python"
    assert environments.interpreter("opacus", "no-python-here", tmp_path) == expected
    stamp.write_text("other versions")
    with pytest.raises(RuntimeError, match="no-python-here is not there: pass --python="):
        environments.interpreter("opacus", "no-python-here", tmp_path)


@pytest.mark.parametrize("name", ZOO)
def test_models_of_the_zoo(name):
    entry = ZOO[name]
    model = entry.build()
    assert model.count_params() == entry.parameters
    assert model.input_shape[1:] == entry.input_shape
    assert model.output_shape[1:] == (entry.classes,)
    x, y = entry.data(2)
    assert x.shape == (2, *entry.input_shape)
    assert y.shape == (2,)
    assert model(x).shape == (2, entry.classes)
    assert name in OWN + COMPARED
