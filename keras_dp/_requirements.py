"""Checks, before anything else is imported, that keras_dp can run in this environment.

A wrong TensorFlow, Keras or dp-accounting otherwise shows up as an error deep inside one of them.
Versions are read from the installed metadata first, because a wrong TensorFlow may fail, or load a
wrong Keras, while it is imported.
"""

import importlib.metadata
import importlib.util
import json
import os
import sys

try:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version
except ModuleNotFoundError as error:
    raise ImportError(
        "keras_dp needs the package `packaging`, which is not installed: "
        "run `pip install packaging`."
    ) from error

# The same bounds are in setup.py.
TENSORFLOW = ">=2.20,<2.22"
KERAS = ">=3.12,<3.16"
DP_ACCOUNTING = ">=0.5,<0.7"

# Every one of these installs the module `tensorflow`. The plain one comes first: where several
# are installed, it is the one that an instruction to the user should name.
_TENSORFLOW_BUILDS = (
    "tensorflow",
    "tensorflow-cpu",
    "tensorflow-tpu",
    "tensorflow-rocm",
    "tensorflow-macos",
    "tf-nightly",
    "tf-nightly-cpu",
    "tf-nightly-tpu",
)


def check():
    """Raises unless TensorFlow, Keras, its backend and dp-accounting are ones that keras_dp knows.

    Raises:
      ImportError: one sentence with what was found, what is supported and what to do.
    """
    _check_tensorflow_metadata()
    _check_legacy_keras()
    _check_keras_metadata()
    _check_configured_backend()
    _check_dp_accounting()
    _check_imported()


def _check_tensorflow_metadata():
    if not _is_installed("tensorflow"):
        raise ImportError(
            f"keras_dp needs TensorFlow ({TENSORFLOW}), and none is installed: install the build "
            'for your machine with `pip install "keras_dp[cpu]"`, `"keras_dp[tensorflow]"`, '
            '`"keras_dp[gpu]"` or `"keras_dp[tpu]"`.'
        )
    found = {name: _distribution_version(name) for name in _TENSORFLOW_BUILDS}
    found = {name: version for name, version in found.items() if version is not None}
    # Metadata of a build that another one has overwritten can stay behind, so one good version is
    # enough here; the version of the module itself is checked at the end.
    if found and not any(_in_range(version, TENSORFLOW) for version in found.values()):
        name, version = next(iter(found.items()))
        raise ImportError(_wrong_version("TensorFlow", name, version, TENSORFLOW))


def _check_legacy_keras():
    if os.environ.get("TF_USE_LEGACY_KERAS") in ("true", "True", "1"):  # As TensorFlow reads it.
        raise ImportError(
            f"TF_USE_LEGACY_KERAS={os.environ['TF_USE_LEGACY_KERAS']} makes tf.keras the old "
            f"Keras 2, which keras_dp cannot train privately: it supports Keras {KERAS}; unset "
            "TF_USE_LEGACY_KERAS before Python starts."
        )


def _check_keras_metadata():
    if not _is_installed("keras"):
        raise ImportError(
            f"keras_dp needs Keras ({KERAS}), which is not installed: "
            f'run `pip install "keras{KERAS}"`.'
        )
    version = _distribution_version("keras")
    if version is not None and not _in_range(version, KERAS):
        raise ImportError(_wrong_version("Keras", "keras", version, KERAS))


def _check_configured_backend():
    """Finds a backend other than TensorFlow before Keras tries to load it, and fails on its own."""
    if "keras" in sys.modules:
        return
    backend = os.environ.get("KERAS_BACKEND")
    if backend:
        _check_backend(backend, f"the environment variable KERAS_BACKEND={backend}")
        return
    path = _keras_config_path()
    try:
        with open(path, encoding="utf-8") as file:
            backend = json.load(file).get("backend", "tensorflow")
    except (OSError, ValueError):  # No such file, or one that Keras ignores as well.
        return
    _check_backend(backend, f'"backend" in {path}')


def _check_backend(backend, source):
    if backend != "tensorflow":
        raise ImportError(
            f"keras_dp runs on the TensorFlow backend of Keras, and {source} selects {backend!r}: "
            "set KERAS_BACKEND=tensorflow before Keras is first imported."
        )


def _check_dp_accounting():
    version = _distribution_version("dp-accounting")
    if version is None and not _is_installed("dp_accounting"):
        raise ImportError(
            f"keras_dp needs dp-accounting ({DP_ACCOUNTING}) to compute epsilon, and it is not "
            f'installed: run `pip install "dp-accounting{DP_ACCOUNTING}"`.'
        )
    # A copy without metadata (a source tree on the path) does not state its version anywhere.
    if version is not None and not _in_range(version, DP_ACCOUNTING):
        raise ImportError(_wrong_version("dp-accounting", "dp-accounting", version, DP_ACCOUNTING))


def _check_imported():
    """Checks what was really loaded, whatever the metadata says."""
    import keras
    import tensorflow as tf

    if not _in_range(tf.__version__, TENSORFLOW):
        raise ImportError(_wrong_version("TensorFlow", "tensorflow", tf.__version__, TENSORFLOW))
    if not _in_range(keras.__version__, KERAS):
        raise ImportError(_wrong_version("Keras", "keras", keras.__version__, KERAS))
    _check_backend(keras.backend.backend(), "the Keras that is already imported")


def _wrong_version(title, distribution, version, supported):
    return (
        f"keras_dp supports {title} {supported}, and {distribution} {version} is installed: "
        f'run `pip install "{distribution}{supported}"`.'
    )


def _in_range(version, supported):
    """Whether a version is supported; a pre-release counts where it lies, before its release."""
    try:
        return SpecifierSet(supported).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return False


def _is_installed(module):
    if module in sys.modules:
        return True
    spec = importlib.util.find_spec(module)
    # A folder left behind by an uninstalled package is found too, but has no file to load.
    return spec is not None and spec.origin is not None


def _distribution_version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _keras_config_path():
    """Where Keras looks for its settings: $KERAS_HOME, else the home folder, else /tmp."""
    folder = os.environ.get("KERAS_HOME")
    if folder is None:
        home = os.path.expanduser("~")
        folder = os.path.join(home if os.access(home, os.W_OK) else "/tmp", ".keras")
    return os.path.expanduser(os.path.join(folder, "keras.json"))
