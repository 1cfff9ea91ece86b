"""What gets installed: the metadata of setup.py, the built archives, and what pip would do."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from keras_dp import _requirements

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
TENSORFLOW_BUILDS = {
    "tensorflow": "tensorflow",
    "cpu": "tensorflow-cpu",
    "gpu": "tensorflow",
    "tpu": "tensorflow-tpu",
}


def run(*command, **options):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A copy of what building the package needs, so that nothing is built in the tree."""
    folder = tmp_path_factory.mktemp("package")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("keras_dp", "tests", "models", "train_scripts", "benchmarks", "tools"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignore)
    names = ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "CHANGELOG.md", "README.md")
    for name in names:
        if (REPOSITORY / name).exists():
            shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.fixture(scope="module")
def metadata(package):
    """The arguments that setup.py gives to setuptools, without building anything."""
    program = """
import json, setuptools
setuptools.setup = lambda **arguments: print(json.dumps(arguments))
exec(compile(open("setup.py").read(), "setup.py", "exec"), {"__file__": "setup.py"})
"""
    return json.loads(run(sys.executable, "-c", program, cwd=package))


def bounds(requirement):
    """The lower and upper bound of a requirement string, each None if it has none."""
    found = {">=": None, "<": None}
    for specifier in Requirement(requirement).specifier:
        assert specifier.operator in found, f"{requirement}: only >= and < are used"
        found[specifier.operator] = Version(specifier.version)
    return found[">="], found["<"]


def named(requirements):
    return {canonicalize_name(Requirement(text).name): text for text in requirements}


def pins(name):
    """(distribution, version) of every line `a==1` of a file, as this Python would read it."""
    for line in (REPOSITORY / name).read_text().splitlines():
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate():
                (specifier,) = requirement.specifier
                assert specifier.operator == "=="
                yield canonicalize_name(requirement.name), Version(specifier.version)


def every_requirement(metadata):
    extras = metadata["extras_require"].values()
    return metadata["install_requires"] + [text for texts in extras for text in texts]


def test_tensorflow_is_offered_as_extras_and_never_required(metadata):
    builds = set(TENSORFLOW_BUILDS.values())
    assert not builds & set(named(metadata["install_requires"]))
    for extra, distribution in TENSORFLOW_BUILDS.items():
        assert list(named(metadata["extras_require"][extra])) == [distribution]
    others = {k: v for k, v in metadata["extras_require"].items() if k not in TENSORFLOW_BUILDS}
    assert set(others) == {"datasets", "plot", "tensorboard", "demo", "secure", "dev", "all"}
    for requirements in others.values():
        assert not builds & set(named(requirements))


def test_all_holds_every_optional_feature(metadata):
    extras = metadata["extras_require"]
    features = set(extras) - set(TENSORFLOW_BUILDS) - {"dev", "all"}
    assert set(extras["all"]) == {text for name in features for text in extras[name]}


def test_every_requirement_has_two_bounds(metadata):
    for text in every_requirement(metadata):
        lower, upper = bounds(text)
        assert lower is not None, text
        # setuptools, which only builds the package, has several major versions a year.
        assert upper is not None or Requirement(text).name == "setuptools", text
        assert upper is None or lower < upper


def test_the_same_package_has_the_same_bounds_everywhere(metadata):
    seen = {}
    for text in every_requirement(metadata):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        assert seen.setdefault(name, requirement.specifier) == requirement.specifier, name


def test_the_import_check_has_the_bounds_of_setup(metadata):
    required = {k: Requirement(v) for k, v in named(metadata["install_requires"]).items()}
    assert required["keras"].specifier == SpecifierSet(_requirements.KERAS)
    assert required["dp-accounting"].specifier == SpecifierSet(_requirements.DP_ACCOUNTING)
    for extra in TENSORFLOW_BUILDS:
        (text,) = metadata["extras_require"][extra]
        assert Requirement(text).specifier == SpecifierSet(_requirements.TENSORFLOW)


def test_python_versions(metadata):
    assert metadata["python_requires"] == ">=3.10,<3.14"


def test_lowest_versions_are_those_of_setup(metadata):
    """`make test-lowest` must run at the lower bounds, wherever this Python has a wheel of them."""
    tested = dict(pins("constraints-lowest.txt"))
    lowest = {n: bounds(t)[0] for n, t in named(every_requirement(metadata)).items()}
    runtime = {*named(metadata["install_requires"]), "tensorflow", "tensorflow-cpu", "tensorboard"}
    assert runtime <= set(tested)
    no_wheels_for_313 = {"numpy", "scipy", "matplotlib"} if sys.version_info >= (3, 13) else set()
    for name, version in tested.items():
        if name not in no_wheels_for_313:
            assert version == lowest[name], name


def test_the_bazel_lock_is_inside_the_bounds(metadata):
    lock = dict(pins("requirements_bazel.txt"))
    checked = set()
    for text in every_requirement(metadata):
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if name in lock:
            assert requirement.specifier.contains(lock[name]), f"{text}: locked {lock[name]}"
            checked.add(name)
    # Bazel uses one build of TensorFlow.
    assert set(named(every_requirement(metadata))) - checked == {"tensorflow-cpu", "tensorflow-tpu"}


def test_version_is_the_same_everywhere(metadata):
    version = metadata["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    newest = re.search(r"^## \[(.+?)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.M)
    assert newest.group(1) == version
    module = re.search(r'\bversion = "(.+?)"', (REPOSITORY / "MODULE.bazel").read_text())
    assert module.group(1) == version


def test_setup_reads_the_version_without_importing_the_package(package, metadata, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(package, copy)
    (copy / "keras_dp" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (copy / "setup_arguments.py").write_text(
        "import setuptools\nsetuptools.setup = lambda **a: print(a['version'])\nimport setup\n"
    )
    assert run(sys.executable, "setup_arguments.py", cwd=copy).strip() == metadata["version"]


def test_only_the_library_is_packaged(metadata):
    found = {
        ".".join(path.parent.relative_to(REPOSITORY).parts)
        for path in (REPOSITORY / "keras_dp").rglob("__init__.py")
    }
    assert set(metadata["packages"]) == found
    assert all(name.split(".")[0] == "keras_dp" for name in metadata["packages"])


def test_every_folder_of_the_library_is_a_package():
    folders = {path.parent for path in (REPOSITORY / "keras_dp").rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_license_is_apache(metadata):
    assert metadata["license_expression"] == "Apache-2.0"
    text = (REPOSITORY / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    for section in range(1, 10):
        assert re.search(rf"^\s+{section}\. ", text, re.M), section
    assert "END OF TERMS AND CONDITIONS" in text


def test_no_tracked_file_is_large():
    if (REPOSITORY / ".git").exists():
        # The folder may belong to somebody else, as in a container.
        listing = run("git", "-c", "safe.directory=*", "ls-files", "-z", cwd=REPOSITORY)
        paths = [REPOSITORY / name for name in listing.split("\0") if name]
    else:  # An archive of the tree holds tracked files only, and what make has added.
        added = {".venv", ".venvs", "output", "build", "dist"}
        paths = [
            path
            for path in REPOSITORY.rglob("*")
            if path.is_file() and path.relative_to(REPOSITORY).parts[0] not in added
        ]
    sizes = {str(path): path.stat().st_size for path in paths if path.is_file()}
    assert {path: size for path, size in sizes.items() if size > 2**20} == {}


OPTIONAL = [
    "cryptography",
    "matplotlib",
    "mlxtend",
    "pandas",
    "sklearn",
    "tensorboard",
    "tensorflow_datasets",
]


def test_importing_the_library_loads_nothing_else():
    program = (
        "import json, sys, keras, tensorflow\n"
        "before = set(sys.modules)\n"
        "import keras_dp\n"
        "print(json.dumps(sorted(name.split('.')[0] for name in set(sys.modules) - before)))"
    )
    loaded = set(json.loads(run(sys.executable, "-c", program, cwd=REPOSITORY)))
    assert "keras_dp" in loaded
    assert not loaded & {*OPTIONAL, "models", "train_scripts", "benchmarks", "tests", "pytest"}


def test_the_library_does_without_the_optional_packages():
    # None makes an import fail. Keras itself imports scikit-learn where it finds it, so the test
    # above cannot see whether keras_dp does.
    program = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL})); import keras_dp"
    run(sys.executable, "-c", program, cwd=REPOSITORY)


def test_ci_runs_make_test_without_input():
    script = REPOSITORY / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert "set -euo pipefail" in text and "make test" in text
    dry = run("make", "--no-print-directory", "--dry-run", "test", cwd=REPOSITORY)
    for command in ("ruff check .", "ruff format --check .", "pytest -n", "pytest -m slow"):
        assert command in dry
    # The runs of pytest come last, so that its summary closes the output.
    assert "-m pytest" in dry.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("machine", "build"), [("x86_64", "cpu"), ("aarch64", "tensorflow"), ("arm64", "tensorflow")]
)
def test_make_installs_a_build_that_the_machine_has(machine, build, tmp_path):
    uname = tmp_path / "uname"
    uname.write_text(f"#!/bin/sh\necho {machine}\n")
    uname.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ("make", "--dry-run", f"VENV={tmp_path}/venv", "lint")
    variables = {key: value for key, value in os.environ.items() if key != "TF"}
    dry = run(*command, cwd=REPOSITORY, env={**variables, "PATH": path})
    assert f'--editable ".[{build},dev]"' in dry
    asked = run(*command, "TF=gpu", cwd=REPOSITORY, env={**variables, "PATH": path})
    assert '--editable ".[gpu,dev]"' in asked


@pytest.fixture(scope="module")
def archives(package, tmp_path_factory):
    """(wheel, sdist), built with the setuptools of this environment."""
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, package)
    (wheel,) = output.glob("*.whl")
    (sdist,) = output.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_wheel_holds_the_library_only(archives):
    with zipfile.ZipFile(archives[0]) as wheel:
        names = set(wheel.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        text = wheel.read(f"{info}/METADATA").decode()
    sources = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "keras_dp").rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert "keras_dp/py.typed" in sources
    assert {name for name in names if not name.startswith(info)} == sources
    assert f"{info}/licenses/LICENSE" in names
    assert "License-Expression: Apache-2.0" in text
    python = re.search("^Requires-Python: (.+)$", text, re.M)
    assert SpecifierSet(python.group(1)) == SpecifierSet(">=3.10,<3.14")


@pytest.mark.slow
def test_wheel_built_from_the_sdist_is_the_same(archives, tmp_path):
    shutil.unpack_archive(archives[1], tmp_path)
    (folder,) = tmp_path.iterdir()
    assert {"setup.py", "pyproject.toml", "LICENSE", "CHANGELOG.md"} <= set(os.listdir(folder))
    assert not (folder / "tests").exists()
    output = tmp_path / "again"
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", output, folder)
    (again,) = output.glob("*.whl")
    with zipfile.ZipFile(again) as second, zipfile.ZipFile(archives[0]) as first:
        assert set(second.namelist()) == set(first.namelist())


@pytest.fixture(scope="module")
def tpu_machine(tmp_path_factory):
    """The Python of a fresh environment that has a stand-in for tensorflow-tpu 2.20.0."""
    folder = tmp_path_factory.mktemp("tpu")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    wheel = folder / "tensorflow_tpu-2.20.0-py3-none-any.whl"
    info = "tensorflow_tpu-2.20.0.dist-info"
    files = {
        "tensorflow/__init__.py": '__version__ = "2.20.0"\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: tensorflow-tpu\nVersion: 2.20.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    return python


def plan(python, package, extra, folder):
    """The distributions that pip would install for keras_dp with an extra: {name: version}."""
    report = folder / "report.json"
    target = f"{package}[{extra}]" if extra else str(package)
    run(
        *(python, "-m", "pip", "install", "--quiet", "--dry-run"),
        *("--report", report, target),
        cwd=folder,
    )
    items = json.loads(report.read_text())["install"]
    return {canonicalize_name(i["metadata"]["name"]): i["metadata"]["version"] for i in items}


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "tpu", "all"])
def test_installing_beside_tensorflow_tpu_brings_no_other_build(
    tpu_machine, package, extra, tmp_path
):
    planned = plan(tpu_machine, package, extra, tmp_path)
    assert {"keras-dp", "keras", "dp-accounting", "scipy"} <= set(planned)
    # These two hold code for data sets and no TensorFlow.
    others = {"tensorflow-datasets", "tensorflow-metadata"}
    assert {name for name in planned if name.startswith("tensorflow")} <= others


@pytest.mark.slow
def test_the_extra_of_another_build_does_bring_it(tpu_machine, package, tmp_path):
    planned = plan(tpu_machine, package, "tensorflow", tmp_path)
    assert planned["tensorflow"] in Requirement("tensorflow>=2.20,<2.22").specifier


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["tensorflow,all", "tensorflow,dev"])
def test_the_extras_go_together(package, extra, tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--upgrade", "pip")
    planned = plan(python, package, extra, tmp_path)
    assert {"tensorflow", "keras", "dp-accounting"} <= set(planned)
    assert "tensorflow-datasets" in planned  # the tests prepare data sets of it
