"""BUILD and MODULE.bazel agree with the tree.

BUILD is Python syntax, so it is parsed with `ast` and compared with the imports of every file.
Except for the first test, nothing here uses the program that writes it.
"""

import ast
import importlib.metadata
import pathlib
import re
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import build_file

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
RUNNER = "tools/pytest_runner.py"
LOCK_ENVIRONMENT = {"python_version": "3.11", "sys_platform": "linux", "extra": ""}
# Modules of the reference programs, which run in environments of their own.
FOREIGN = build_file.SEPARATE_ENVIRONMENTS


def python_files():
    folders = ("benchmarks", "keras_dp", "models", "tests", "tools", "train_scripts")
    return {
        path.relative_to(REPOSITORY).as_posix(): path.read_text()
        for folder in folders
        for path in (REPOSITORY / folder).rglob("*.py")
    }


def value_of(node):
    """The value of an attribute: literals, lists of them, and requirement("x") as @x."""
    if isinstance(node, ast.List):
        return [value_of(item) for item in node.elts]
    if isinstance(node, ast.Call):
        assert node.func.id == "requirement", ast.unparse(node)
        return "@" + canonicalize_name(ast.literal_eval(node.args[0]))
    return ast.literal_eval(node)


@pytest.fixture(scope="module")
def targets():
    """{name: {attribute: value, "rule": py_library | py_binary | py_test}}."""
    found = {}
    for node in ast.parse((REPOSITORY / "BUILD").read_text()).body:
        call = getattr(node, "value", None)
        if not isinstance(call, ast.Call) or not call.func.id.startswith("py_"):
            continue
        attributes = {argument.arg: value_of(argument.value) for argument in call.keywords}
        name = attributes["name"]
        assert name not in found, f"BUILD has two targets {name}"
        found[name] = {"rule": call.func.id, "deps": [], **attributes}
    return found


@pytest.fixture(scope="module")
def files():
    return python_files()


def of_kind(targets, rule):
    return {name: target for name, target in targets.items() if target["rule"] == rule}


def file_of_module(name, files):
    path = name.replace(".", "/")
    for candidate in (f"{path}.py", f"{path}/__init__.py"):
        if candidate in files:
            return candidate
    return None


def without_functions(tree):
    """The tree without the bodies of its functions."""

    class Remover(ast.NodeTransformer):
        def visit_FunctionDef(self, node):
            return None

    return Remover().visit(tree)


def loaded_files(path, tree, files):
    """(files of the repository, other top-level modules) that a file's imports load directly."""
    folder = path.rsplit("/", 1)[0].split("/")
    wanted = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            wanted |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            source = ".".join(part for part in (start, node.module) if part)
            members = {f"{source}.{alias.name}" for alias in node.names}
            submodules = {name for name in members if file_of_module(name, files)}
            wanted |= submodules
            if submodules != members:
                wanted.add(source)
    inside, outside = set(), set()
    for name in wanted:
        parts = name.split(".")
        way = [file_of_module(".".join(parts[: end + 1]), files) for end in range(len(parts))]
        if any(way):
            inside |= {step for step in way if step}
        else:
            outside.add(parts[0])
    already = {"/".join(folder[: end + 1]) + "/__init__.py" for end in range(len(folder))}
    return inside - already - {path}, outside - set(sys.stdlib_module_names)


def distributions_of(modules):
    """Names on the package index of top-level modules."""
    other = {"absl": "absl-py", "sklearn": "scikit-learn"}
    return {"@" + canonicalize_name(other.get(name, name)) for name in modules - FOREIGN}


def depends(label, other, targets):
    """Whether a target reaches another one."""
    reached = {label}
    while True:
        more = {
            dependency
            for name in reached
            if name.startswith(":")
            for dependency in targets[name[1:]]["deps"]
        }
        if more <= reached:
            return other in reached
        reached |= more


def test_build_is_what_the_tool_writes():
    written = build_file.render(build_file.read_modules(REPOSITORY))
    assert (REPOSITORY / "BUILD").read_text() == written, "run: python -m tools.build_file"


def test_every_file_has_its_target(targets, files):
    libraries = {
        source for target in of_kind(targets, "py_library").values() for source in target["srcs"]
    }
    tests = {target["srcs"][0] for target in of_kind(targets, "py_test").values()}
    programs = {target["main"] for target in of_kind(targets, "py_binary").values()}
    expected_tests = {p for p in files if re.fullmatch(r"tests/(.*/)?test_[^/]*\.py", p)}
    assert tests == expected_tests
    assert libraries == set(files) - expected_tests - {RUNNER}
    assert programs == {
        path
        for path, text in files.items()
        if '\nif __name__ == "__main__":' in text and path not in expected_tests | {RUNNER}
    }


def test_every_named_file_and_target_exists(targets):
    for name, target in targets.items():
        for path in [*target["srcs"], *([target["main"]] if "main" in target else [])]:
            assert (REPOSITORY / path).is_file(), f"{name} names {path}"
        for label in target.get("data", []):
            assert label == ":test_data" or (REPOSITORY / label).is_file(), f"{name}: {label}"
        for label in target["deps"]:
            assert label.startswith("@") or label.removeprefix(":") in targets, f"{name}: {label}"
        if "main" in target:
            assert target["main"] in target["srcs"]


def test_the_deps_are_the_imports(targets, files):
    library_of = {
        target["srcs"][0]: f":{name}" for name, target in of_kind(targets, "py_library").items()
    }
    wrong = {}
    for name, target in targets.items():
        path = target["srcs"][0]
        if target["rule"] == "py_binary":
            wanted = {library_of[path]}
        else:
            tree = ast.parse(files[path])
            inside, outside = loaded_files(path, tree, files)
            at_once, _ = loaded_files(path, without_functions(tree), files)
            # Left out where it would close a cycle: only an import in a function may do so.
            inside -= {
                source
                for source in inside - at_once
                if depends(library_of[source], f":{name}", targets)
            }
            wanted = {library_of[source] for source in inside} | distributions_of(outside)
        if target["rule"] == "py_test":
            folder = pathlib.PurePosixPath(path).parent
            near = [(parent / "conftest.py").as_posix() for parent in [folder, *folder.parents]]
            wanted |= {library_of[conftest] for conftest in near if conftest in files}
            wanted.add("@pytest")
        assert len(target["deps"]) == len(set(target["deps"])), f"{name} repeats a dependency"
        if wanted != set(target["deps"]):
            wrong[name] = {
                "missing": sorted(wanted - set(target["deps"])),
                "superfluous": sorted(set(target["deps"]) - wanted),
            }
    assert wrong == {}


def test_no_target_depends_on_itself_through_others(targets):
    def visit(name, trail):
        assert name not in trail, " -> ".join([*trail[trail.index(name) :], name])
        if name not in done:
            for label in targets[name]["deps"]:
                if label.startswith(":"):
                    visit(label[1:], [*trail, name])
            done.add(name)

    done = set()
    for name in targets:
        visit(name, [])


def test_the_library_depends_on_the_library_only(targets):
    required = {canonicalize_name(name) for name in ("absl-py", "dp-accounting", "keras", "numpy")}
    allowed = {f"@{name}" for name in required | {"packaging", "scipy", "tensorflow"}}
    optional = {"keras_dp.secure_noise": {"@cryptography"}}
    for name, target in of_kind(targets, "py_library").items():
        if name.split(".")[0] == "keras_dp":
            inside = {label for label in target["deps"] if label.startswith(":keras_dp")}
            assert set(target["deps"]) - inside <= allowed | optional.get(name, set()), name
        assert target.get("testonly", False) == target["srcs"][0].startswith("tests/"), name


def test_the_models_know_nothing_of_privacy(targets):
    for name, target in targets.items():
        if name.split(".")[0] == "models":
            assert not [label for label in target["deps"] if "keras_dp" in label], name


def test_every_requirement_is_locked_for_bazel(targets):
    lock = (REPOSITORY / "requirements_bazel.txt").read_text()
    names = re.findall(r"^([^#\s=]+)==", lock, re.M)
    locked = {"@" + canonicalize_name(name) for name in names}
    used = {
        label for target in targets.values() for label in target["deps"] if label.startswith("@")
    }
    assert "@keras" in used
    assert used <= locked
    assert len(locked) == len(names)


def test_the_lock_is_closed():
    """Bazel installs each distribution alone, so the lock must hold what each of them needs."""
    text = (REPOSITORY / "requirements_bazel.txt").read_text()
    locked = {canonicalize_name(name) for name in re.findall(r"^([^#\s=]+)==", text, re.M)}
    for name in ("keras", "dp-accounting", "scikit-learn", "matplotlib", "pytest", "hypothesis"):
        for line in importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            # As on the machines the lock is for.
            if needed.marker is None or needed.marker.evaluate(LOCK_ENVIRONMENT):
                assert canonicalize_name(needed.name) in locked, f"{name} needs {needed.name}"


def test_each_test_target_runs_its_file_under_pytest(targets):
    for target in of_kind(targets, "py_test").values():
        assert target["srcs"][1:] == [RUNNER] and target["main"] == RUNNER
        assert target["args"] == [target["srcs"][0]]
        assert target["data"] == [":test_data"]


def test_module_file_reads_the_lock_under_the_name_that_build_loads():
    module = (REPOSITORY / "MODULE.bazel").read_text()
    assert 'requirements_lock = "//:requirements_bazel.txt"' in module
    hub = re.search(r'hub_name = "(\w+)"', module).group(1)
    assert f'load("@{hub}//:requirements.bzl", "requirement")' in (REPOSITORY / "BUILD").read_text()
    assert f'use_repo(pip, "{hub}")' in module
    assert len(set(re.findall(r'python_version = "(.+?)"', module))) == 1


TREE = {
    "keras_dp/__init__.py": "from keras_dp.noise import draw\n",
    "keras_dp/noise.py": "import math\nimport numpy as np\nfrom . import errors\n",
    "keras_dp/errors.py": "",
    "models/cnn.py": "import keras\n",
    "train_scripts/demo.py": 'from models import cnn\n\nif __name__ == "__main__":\n    cnn()\n',
    "benchmarks/peer.py": "def run():\n    import opacus\n",
    "tests/conftest.py": "import keras\n",
    "tests/fixtures/zoo.py": "from models.cnn import build\n",
    "tests/test_noise.py": "from keras_dp.noise import draw\n",
    "tests/deep/test_more.py": "from tests.fixtures import zoo\n",
    "tools/pytest_runner.py": "import pytest\n",
    "requirements_bazel.txt": "keras==3\nnumpy==2\npytest==9\n",
}


@pytest.fixture
def small_tree(tmp_path):
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_tool_on_a_small_tree(small_tree):
    modules = build_file.read_modules(small_tree)
    assert modules["keras_dp"].imports == {"keras_dp.noise"}
    assert modules["keras_dp.noise"].imports == {"keras_dp.errors"}
    assert modules["keras_dp.noise"].requirements == {"numpy"}
    assert modules["train_scripts.demo"].imports == {"models.cnn"}
    assert modules["tests.test_noise"].imports == {"keras_dp", "keras_dp.noise", "tests.conftest"}
    assert modules["tests.deep.test_more"].imports == {"tests.fixtures.zoo", "tests.conftest"}
    assert modules["benchmarks.peer"].separate
    text = build_file.render(modules)
    assert text == build_file.render(build_file.read_modules(small_tree))
    assert 'name = "train_scripts/demo",\n    srcs = ["train_scripts/demo.py"],' in text
    assert text.count('tags = ["manual"]') == 1
    assert text.count("py_binary(") == 1 and text.count("py_test(") == 2


def test_tool_leaves_out_an_import_in_a_function_that_closes_a_cycle(small_tree):
    source = (
        "import math\n\ndef f():\n    from keras_dp import noise\n    from keras_dp import extra\n"
    )
    (small_tree / "keras_dp" / "errors.py").write_text(source)
    (small_tree / "keras_dp" / "extra.py").write_text("")
    modules = build_file.read_modules(small_tree)
    assert modules["keras_dp.noise"].imports == {"keras_dp.errors"}
    assert modules["keras_dp.errors"].imports == {"keras_dp.extra"}


def test_tool_refuses_an_import_it_does_not_know(small_tree):
    (small_tree / "models" / "cnn.py").write_text("import kearas\n")
    with pytest.raises(ValueError, match="models/cnn.py imports kearas, which is neither"):
        build_file.read_modules(small_tree)


def test_tool_checks_and_repairs(small_tree, capsys):
    arguments = ["--root", str(small_tree)]
    assert build_file.main([*arguments, "--check"]) == 1
    assert build_file.main(arguments) == 0
    assert build_file.main([*arguments, "--check"]) == 0
    (small_tree / "keras_dp" / "errors.py").write_text("import keras\n")
    capsys.readouterr()
    assert build_file.main([*arguments, "--check"]) == 1
    assert '+    deps = [requirement("keras")],' in capsys.readouterr().out
