"""A ledger on disk: read whole, written whole, by one process at a time."""

import contextlib
import hashlib
import json
import os
import pathlib
import tempfile

from keras_dp.errors import LedgerError

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

FORMAT = "keras_dp privacy ledger"
VERSION = 1
DEFAULT_NAME = "privacy_ledger.json"


def checked_path(path):
    """Where the ledger lives, as an absolute path.

    Args:
      path: str or path. A folder stands for ``privacy_ledger.json`` in it.

    Returns:
      ``pathlib.Path``.

    Raises:
      LedgerError: not a path, or one of a remote file system.
    """
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise LedgerError(
            f"A ledger's path must be a file or a folder; received {path!r}. Pass for example "
            "'checkpoints/privacy_ledger.json'."
        )
    if fcntl is None:
        raise LedgerError(
            "A ledger on disk needs file locks (fcntl), which this operating system lacks: two "
            "runs could lose what the other spent. Keep it in memory, PrivacyLedger(num_examples="
            "...), and store its to_json()."
        )
    if "://" in os.fspath(path):
        raise LedgerError(
            f"A ledger must be on a file system with locks and renaming; received {str(path)!r}. "
            "Keep it on a local or network disk, and copy it when training has ended."
        )
    path = pathlib.Path(path).expanduser().resolve()
    return path / DEFAULT_NAME if path.is_dir() else path


@contextlib.contextmanager
def locked(path):
    """While open, no other process is in here for the same ledger; a crash opens the lock.

    The lock is on a file of its own: the ledger is replaced at each write.
    """
    with _writable(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.with_name(path.name + ".lock"), "a")
    with lock:
        with _writable(path):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def dumps(content):
    """A ledger's content as text, with its format, version and checksum.

    Args:
      content: dict that JSON can hold.

    Returns:
      str.
    """
    body = {"format": FORMAT, "version": VERSION, **content}
    return json.dumps(body | {"checksum": _checksum(body)}, indent=1, allow_nan=False) + "\n"


def loads(text, source):
    """The content that :func:`dumps` wrote.

    Args:
      text: str.
      source: where the text comes from, for errors.

    Returns:
      dict.

    Raises:
      LedgerError: text that is damaged, of something else or of a later version.
    """
    try:
        body = json.loads(text)
    except ValueError as error:
        raise LedgerError(f"{source} is no ledger, or damaged ({error}). {_RESTORE}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise LedgerError(f"{source} is JSON, but no ledger of keras_dp. {_RESTORE}")
    version = body.get("version")
    if isinstance(version, int) and version > VERSION:
        raise LedgerError(
            f"{source} has version {version} of the format; this keras_dp reads versions up to "
            f"{VERSION}. Install the keras_dp that wrote it, or a later one."
        )
    found = body.pop("checksum", None)
    if found != _checksum(body):
        raise LedgerError(
            f"{source} is damaged: its checksum does not match its content, which was cut, mixed "
            f"up or edited by hand. {_RESTORE}"
        )
    del body["format"], body["version"]
    return body


def read(path):
    """The content of the ledger at ``path``; None if there is no such file.

    Raises:
      LedgerError: as for :func:`loads`, and if the file cannot be read.
    """
    try:
        return loads(path.read_text(encoding="utf-8"), f"The ledger {path}")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"The ledger {path} cannot be read ({error}). {_RESTORE}") from error


def write(path, content):
    """Replaces the ledger at ``path``. After a crash it holds the old content or the new."""
    with _writable(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(dumps(content))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        folder = os.open(path.parent, os.O_RDONLY)  # makes the new name outlive a power cut
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextlib.contextmanager
def _writable(path):
    try:
        yield
    except OSError as error:
        raise LedgerError(
            f"The ledger {path} cannot be written ({error}), so no update may be made that it "
            "would not count. Make room, or the folder writable, or choose another path."
        ) from error


_RESTORE = (
    "Restore it from a copy. Without one nobody knows what was spent on the data: do not start a "
    "new ledger as if nothing had been."
)


def _checksum(body):
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()
