"""Runs a program that prints a line of JSON, within limits of time and memory."""

import json
import pathlib
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
_LOOK_EVERY_S = 0.2


def run(command, *, seconds, gigabytes, log):
    """Runs ``command`` in the root of the repository.

    Args:
      command: list of strings.
      seconds: it is ended when it takes longer.
      gigabytes: it is ended when it holds more, in units of 2^30 bytes. Looked at five times a
        second, on Linux; elsewhere there is no such limit.
      log: file for what it writes to standard error.

    Returns:
      The dict that it printed last, or one with an ``error`` and the ``peak_rss_mb`` seen.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    output, peak, over = log.with_suffix(".out"), 0.0, None
    with output.open("w") as out, log.open("w") as err:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=out, stderr=err, cwd=ROOT)
        try:
            while process.poll() is None and over is None:
                time.sleep(_LOOK_EVERY_S)
                peak = max(peak, _rss_mb(process.pid))
                if peak > 1024 * gigabytes:
                    over = f"over the limit of {gigabytes:g} GB"
                elif time.monotonic() - start > seconds:
                    over = f"over the limit of {seconds:g} s"
        finally:
            process.kill()  # does nothing to a process that has ended
            process.wait()
    if over:
        return {"error": over, "peak_rss_mb": peak}
    lines = [line for line in output.read_text().splitlines() if line.startswith("{")]
    if process.returncode == 0 and lines:
        return json.loads(lines[-1])
    if process.returncode < 0:  # what it wrote last need not be why
        name = signal.Signals(-process.returncode).name
        return {"error": f"exit code {process.returncode} ({name})", "peak_rss_mb": peak}
    last = (log.read_text().splitlines() or [""])[-1]
    return {"error": f"exit code {process.returncode}: {last[:300]}", "peak_rss_mb": peak}


def _rss_mb(pid):
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has just ended, or this is not Linux
    return sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS:"))
