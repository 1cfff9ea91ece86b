"""keras_dp/_requirements.py: each wrong environment gets its own sentence, before anything breaks.

The checks run in a Python without site-packages (`-S`) that sees only distributions made up here:
for each a module and its metadata.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import packaging
import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

GOOD = {"tensorflow-cpu": "2.21.0", "keras": "3.15.1", "dp-accounting": "0.6.0"}
MODULES = {"keras": "keras", "dp-accounting": "dp_accounting"}

CHECK = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("_requirements", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
try:
    module.check()
except ImportError as error:
    print(error)
else:
    print("supported")
print(sorted({"tensorflow", "keras"} & set(sys.modules)))
"""

KERAS = """
import json, os
__version__ = {version!r}
name = os.environ.get("KERAS_BACKEND") or "tensorflow"
class backend:
    backend = staticmethod(lambda: name)
if name != "tensorflow":
    raise ModuleNotFoundError("No module named " + name)
"""


@pytest.fixture
def environment(tmp_path):
    """A function that runs `check()` among the given distributions: (its sentence, imports)."""

    def run(versions, module_versions=None, variables=None, before="", with_packaging=True):
        site = tmp_path / "site"
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        shutil.rmtree(site, ignore_errors=True)
        site.mkdir()
        if with_packaging:
            (site / "packaging").symlink_to(pathlib.Path(packaging.__file__).parent)
        for name, version in versions.items():
            module = MODULES.get(name, "tensorflow")
            text = KERAS if module == "keras" else "__version__ = {version!r}\n"
            version_of_module = (module_versions or {}).get(name, version)
            (site / module).mkdir(exist_ok=True)
            (site / module / "__init__.py").write_text(text.format(version=version_of_module))
            info = site / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            info.joinpath("METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            )
        result = subprocess.run(
            [
                sys.executable,
                "-S",
                "-c",
                before + CHECK,
                str(REPOSITORY / "keras_dp/_requirements.py"),
            ],
            env={"PYTHONPATH": str(site), "HOME": str(home), **(variables or {})},
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        sentence, imported = result.stdout.strip().split("\n")
        return sentence, imported

    return run


def without(name):
    return {key: value for key, value in GOOD.items() if key != name}


@pytest.mark.parametrize(
    ("build", "tensorflow", "keras", "dp_accounting"),
    [
        ("tensorflow", "2.20.0", "3.12.0", "0.5.0"),
        ("tensorflow-cpu", "2.21.1", "3.15.9", "0.6.3"),
        ("tensorflow-tpu", "2.20.0", "3.13", "0.5"),
        ("tf-nightly", "2.21.0.dev20260101", "3.15.1", "0.6.0"),
        # A build that _requirements.py has never heard of.
        ("tensorflow-vendor", "2.21.0+nv25", "3.15.1", "0.6.0"),
    ],
)
def test_supported_versions_pass(environment, build, tensorflow, keras, dp_accounting):
    versions = {build: tensorflow, "keras": keras, "dp-accounting": dp_accounting}
    assert environment(versions) == ("supported", "['keras', 'tensorflow']")


def test_missing_tensorflow_names_the_extras(environment):
    sentence, imported = environment(without("tensorflow-cpu"))
    assert "needs TensorFlow (>=2.20,<2.22), and none is installed" in sentence
    for extra in ("cpu", "tensorflow", "gpu", "tpu"):
        assert f'"keras_dp[{extra}]"' in sentence
    assert imported == "[]"


def test_folder_left_by_an_uninstalled_tensorflow_is_no_tensorflow(environment, tmp_path):
    left = tmp_path / "left"
    (left / "tensorflow").mkdir(parents=True)
    before = f"import sys; sys.path.append({str(left)!r})\n"
    sentence, _ = environment(without("tensorflow-cpu"), before=before)
    assert "needs TensorFlow (>=2.20,<2.22), and none is installed" in sentence


@pytest.mark.parametrize(
    ("build", "version"),
    [
        ("tensorflow", "2.15.1"),
        ("tensorflow-cpu", "2.19.1"),
        ("tensorflow", "2.20.0rc0"),
        ("tensorflow-tpu", "2.22.0"),
        ("tensorflow-cpu", "2.22.0rc1"),
        ("tf-nightly", "3.0.0.dev1"),
    ],
)
def test_wrong_tensorflow_is_found_without_importing_it(environment, build, version):
    sentence, imported = environment({**without("tensorflow-cpu"), build: version})
    assert sentence == (
        f"keras_dp supports TensorFlow >=2.20,<2.22, and {build} {version} is installed: "
        f'run `pip install "{build}>=2.20,<2.22"`.'
    )
    assert imported == "[]"


@pytest.mark.parametrize("version", ["2.21.0rc1", "2.21.0-dev20260101", "2.22.0.dev20260101"])
def test_pre_releases_count_where_they_lie(environment, version):
    sentence, _ = environment({**GOOD, "tensorflow-cpu": version})
    assert (sentence == "supported") == version.startswith("2.21")


def test_leftover_metadata_of_another_build_does_no_harm(environment):
    versions = {"tensorflow-macos": "2.15.0", **GOOD}
    assert environment(versions)[0] == "supported"


def test_the_module_decides_when_metadata_is_wrong(environment):
    sentence, _ = environment(GOOD, {"tensorflow-cpu": "2.19.0"})
    assert "supports TensorFlow >=2.20,<2.22, and tensorflow 2.19.0 is installed" in sentence
    sentence, _ = environment(GOOD, {"tensorflow-cpu": "unknown"})
    assert "tensorflow unknown is installed" in sentence
    sentence, _ = environment(GOOD, {"keras": "3.11.0"})
    assert "supports Keras >=3.12,<3.16, and keras 3.11.0 is installed" in sentence


def test_missing_keras(environment):
    sentence, imported = environment(without("keras"))
    assert sentence == (
        "keras_dp needs Keras (>=3.12,<3.16), which is not installed: "
        'run `pip install "keras>=3.12,<3.16"`.'
    )
    assert imported == "[]"


@pytest.mark.parametrize("version", ["2.15.0", "3.11.3", "3.16.0", "3.16.0.dev2"])
def test_wrong_keras(environment, version):
    sentence, imported = environment({**GOOD, "keras": version})
    assert sentence == (
        f"keras_dp supports Keras >=3.12,<3.16, and keras {version} is installed: "
        'run `pip install "keras>=3.12,<3.16"`.'
    )
    assert imported == "[]"


@pytest.mark.parametrize("value", ["1", "True"])
def test_legacy_keras(environment, value):
    sentence, imported = environment(GOOD, variables={"TF_USE_LEGACY_KERAS": value})
    assert f"TF_USE_LEGACY_KERAS={value} makes tf.keras the old Keras 2" in sentence
    assert "unset TF_USE_LEGACY_KERAS" in sentence
    assert imported == "[]"


@pytest.mark.parametrize("value", ["0", ""])
def test_legacy_keras_switched_off(environment, value):
    assert environment(GOOD, variables={"TF_USE_LEGACY_KERAS": value})[0] == "supported"


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backend_in_the_environment(environment, backend):
    sentence, imported = environment(GOOD, variables={"KERAS_BACKEND": backend})
    assert f"KERAS_BACKEND={backend} selects '{backend}'" in sentence
    assert "set KERAS_BACKEND=tensorflow before Keras is first imported" in sentence
    assert imported == "[]"


@pytest.mark.parametrize("folder", ["home/.keras", "elsewhere"])
def test_other_backend_in_the_configuration_file(environment, tmp_path, folder):
    path = tmp_path / folder / "keras.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"backend": "torch"}')
    variables = {} if folder.startswith("home") else {"KERAS_HOME": str(path.parent)}
    sentence, imported = environment(GOOD, variables=variables)
    assert f"\"backend\" in {path} selects 'torch'" in sentence
    assert imported == "[]"
    # The environment wins over the file, in Keras and here.
    assert environment(GOOD, variables={**variables, "KERAS_BACKEND": "tensorflow"})[0] == (
        "supported"
    )


@pytest.mark.parametrize("text", ["not JSON", "{}", '{"backend": "tensorflow"}'])
def test_harmless_configuration_files(environment, tmp_path, text):
    path = tmp_path / "home/.keras/keras.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert environment(GOOD)[0] == "supported"


def test_backend_of_a_keras_that_is_already_imported(environment):
    before = "import keras\nkeras.backend.backend = lambda: 'jax'\n"
    sentence, _ = environment(GOOD, before=before)
    assert "the Keras that is already imported selects 'jax'" in sentence


def test_missing_dp_accounting(environment):
    sentence, imported = environment(without("dp-accounting"))
    assert "needs dp-accounting (>=0.5,<0.7) to compute epsilon" in sentence
    assert 'run `pip install "dp-accounting>=0.5,<0.7"`' in sentence
    assert imported == "[]"


@pytest.mark.parametrize("version", ["0.4.4", "0.7.0rc1"])
def test_wrong_dp_accounting(environment, version):
    sentence, imported = environment({**GOOD, "dp-accounting": version})
    assert sentence == (
        f"keras_dp supports dp-accounting >=0.5,<0.7, and dp-accounting {version} is installed: "
        'run `pip install "dp-accounting>=0.5,<0.7"`.'
    )
    assert imported == "[]"


def test_missing_packaging(environment):
    before = """
import importlib.util, sys
try:
    spec = importlib.util.spec_from_file_location("_requirements", sys.argv[1])
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
except ImportError as error:
    print(error)
    print(sorted({"tensorflow", "keras"} & set(sys.modules)))
    sys.exit()
"""
    sentence, imported = environment(GOOD, before=before, with_packaging=False)
    assert "needs the package `packaging`" in sentence and "pip install packaging" in sentence
    assert imported == "[]"


@pytest.mark.parametrize(
    ("variable", "sentence"),
    [
        ({"KERAS_BACKEND": "jax"}, "KERAS_BACKEND=jax selects 'jax'"),
        ({"TF_USE_LEGACY_KERAS": "1"}, "makes tf.keras the old Keras 2"),
    ],
)
def test_importing_the_package_runs_the_check_first(variable, sentence):
    result = subprocess.run(
        [sys.executable, "-c", "import keras_dp"],
        env={**os.environ, **variable},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.strip().split("\n")[-1].startswith("ImportError: ")
    assert sentence in result.stderr
