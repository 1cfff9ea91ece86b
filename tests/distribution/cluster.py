"""Starts programs as the workers of one cluster, on this machine, and collects what they found."""

import contextlib
import json
import os
import pathlib
import pickle
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Cluster:
    """Running workers of ``python -m tests.distribution.PROGRAM``.

    Args:
      program: str, module in this package.
      folder: path; worker k writes its output to k.log and its findings to k.pickle.
      workers: int.
      *arguments: of the program.
      cpus: int, logical CPUs, and so replicas, of each worker.
    """

    def __init__(self, program, folder, workers, *arguments, cpus=1):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        hosts = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        self.processes = [
            self._start(program, hosts, index, cpus, arguments) for index in range(workers)
        ]

    def _start(self, program, hosts, index, cpus, arguments):
        task = {"type": "worker", "index": index}
        settings = {
            "TF_CONFIG": json.dumps({"cluster": {"worker": hosts}, "task": task}),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TF_ENABLE_ONEDNN_OPTS": "0",
            "CUDA_VISIBLE_DEVICES": "",
            "CPUS_OF_WORKER": str(cpus),
            "PYTHONWARNINGS": "ignore",
        }
        with open(self.folder / f"{index}.log", "w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", f"tests.distribution.{program}", self.folder, *arguments],
                cwd=ROOT,
                env=os.environ | settings,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self, index):
        """Ends a worker as a power cut would."""
        self.processes[index].send_signal(signal.SIGKILL)

    def wait(self, timeout=240):
        """The exit codes, when all have ended; an error if they do not in so many seconds."""
        end = time.monotonic() + timeout
        try:
            return [process.wait(end - time.monotonic()) for process in self.processes]
        finally:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()

    def log(self, index):
        """What a worker has printed."""
        return (self.folder / f"{index}.log").read_text()

    def found(self, timeout=240):
        """What each worker has found, when all have ended well."""
        codes = self.wait(timeout)
        logs = "\n".join(self.log(k)[-3000:] for k, code in enumerate(codes) if code)
        assert not any(codes), f"exit codes {codes}:\n{logs}"
        names = [self.folder / f"{k}.pickle" for k in range(len(codes))]
        return [pickle.loads(name.read_bytes()) for name in names]


def free_ports(number):
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
