"""Virtual environments of the other libraries, each with the versions it needs.

They cannot be installed beside one another, nor beside keras_dp: TensorFlow Privacy needs
TensorFlow 2.15.
"""

import pathlib
import shutil
import subprocess

from benchmarks.limits import ROOT

REQUIREMENTS = pathlib.Path(__file__).parent / "requirements"
LIBRARIES = tuple(sorted(path.stem for path in REQUIREMENTS.glob("*.txt")))
FOLDER = ROOT / ".venvs"


def interpreter(library, python, folder=FOLDER, requirements=None):
    """The interpreter of a library's environment, which is made if it is missing or out of date.

    Args:
      library: one of LIBRARIES, or another name with ``requirements`` of its own.
      python: the Python 3.11 to make it with.
      folder: where the environments are.
      requirements: path of the file with the versions, for pip; by default the library's.

    Returns:
      Path of the interpreter.

    Raises:
      RuntimeError: when it cannot be made; says what to do.
    """
    environment = folder / library
    path = environment / "bin" / "python"
    requirements = requirements or REQUIREMENTS / f"{library}.txt"
    wanted = requirements.read_text()
    installed = environment / "installed.txt"
    if installed.exists() and installed.read_text() == wanted:
        return path
    print(f"Installing {library} into {environment.name}", flush=True)
    shutil.rmtree(environment, ignore_errors=True)
    _run([python, "-m", "venv", environment])
    _require_version(path)
    _run([path, "-m", "pip", "install", "--quiet", "--requirement", requirements])
    installed.write_text(wanted)
    return path


def _require_version(path):
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    found = _run([path, "-c", code]).stdout.strip()
    if found != "3.11":
        raise RuntimeError(
            f"The other libraries' versions are for Python 3.11, received Python {found}: pass "
            "--python=python3.11 or its path."
        )


def _run(command):
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise RuntimeError(
            f"{command[0]} is not there: pass --python=, the path of a Python 3.11."
        ) from error
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{error.stderr}") from error
