"""A process that has imported the project already, and forks others from itself.

Importing torch and transformers costs every process seconds of CPU. A run that starts a server and a
trainer on one machine pays once: the template imports their modules, and each process is a fork of it.

This is not `multiprocessing`'s fork server because a service needs the life of `python -m module`: its
own environment, its own process group before anybody can signal it, its command line in `ps`, an
ordinary end of the interpreter (`atexit`), and no import of the caller's main module.

A forked process gets SIGTERM when the template dies, and the template ends with the process that made
it. Not covered: modules that start threads or a GPU's context at import; `fork_server_process` then
starts the process afresh. Linux only.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from headway.contracts.errors import ServiceError

STATUS_BYTES = 4
MAX_REQUEST_BYTES = 1 << 19
WHILE_IMPORTING = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""While importing: no threads, since a fork has only the one that forked, and no look at GPUs but through
NVML, since a fork must make its own CUDA context. Forks get the threads that their environment names."""
START_TIMEOUT_S = 120.0
"""Seconds for the imports and a fork together, on a loaded machine."""


class ForkServer:
    """Starts processes by forking one that has imported `modules`; safe to use from several threads."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Start importing; returns at once.

        Args:
            modules: what to import. One that is missing here is left to the forked process.
            env: added to this process's environment while importing.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST_BYTES)
        self._socket = ours
        self._lock = threading.Lock()
        self._is_ready = False
        environment = {**os.environ, **(env or {}), **WHILE_IMPORTING}
        command = [
            sys.executable,
            "-m",
            "headway.runtime.fork_server_process",
            str(theirs.fileno()),
        ]
        with theirs:
            self._popen = subprocess.Popen(
                [*command, *modules],
                stdin=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def is_ready(self) -> bool:
        """True if the imports are done, so that a fork takes milliseconds."""
        with self._lock:
            return self._is_ready or self._hear(0.0)

    def start(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], log: int
    ) -> ForkedProcess:
        """Run `python -m module arguments` in a fork; waits for the imports.

        Args:
            env: the whole environment of the process.
            log: file descriptor for standard output and error.

        Raises:
            ServiceError: the template is gone, or does not answer.
        """
        request = {"module": module, "arguments": list(arguments), "env": dict(env)}
        message = json.dumps(request | {"cwd": str(Path.cwd())}).encode()
        reading, writing = os.pipe()
        try:
            with self._lock:
                if not self._is_ready and not self._hear(START_TIMEOUT_S):
                    raise ServiceError(
                        f"the process template did not import in {START_TIMEOUT_S:g} s"
                    )
                socket.send_fds(self._socket, [message], [writing, log])
        except OSError as error:
            os.close(reading)
            raise ServiceError(f"the process template ended: {error}") from error
        finally:
            os.close(writing)
        return ForkedProcess(reading)

    def close(self) -> None:
        """End the template, and with it everything that it forked."""
        self._socket.close()
        if self._popen.poll() is None:
            self._popen.terminate()
        self._popen.wait()

    def _hear(self, timeout_s: float) -> bool:
        """Wait for the byte that says that the imports are done; the lock is held."""
        readable, _, _ = select.select([self._socket], [], [], timeout_s)
        if readable and not self._socket.recv(1):
            raise ServiceError(f"the process template ended with status {self._popen.wait()}")
        self._is_ready = bool(readable)
        return self._is_ready


class ForkedProcess:
    """A process that a template forked; `pid`, `poll` and `wait` are those of `subprocess.Popen`."""

    def __init__(self, pipe: int) -> None:
        """Args:
        pipe: reading end; the template writes the process id, and the exit status once it ended.
        """
        self._pipe = pipe
        self._lock = threading.Lock()
        self._status: int | None = None
        pid = os.read(pipe, STATUS_BYTES)
        if len(pid) < STATUS_BYTES:
            os.close(pipe)
            raise ServiceError("the process template ended before it forked")
        self.pid = int.from_bytes(pid, "little")

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._read(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Block until the process has ended.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (status := self._read(0.05)) is None:  # short looks: other threads wait, too
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return status

    def _read(self, timeout_s: float) -> int | None:
        with self._lock:
            if self._status is not None or not select.select([self._pipe], [], [], timeout_s)[0]:
                return self._status
            status = os.read(self._pipe, STATUS_BYTES)
            os.close(self._pipe)
            # A template that dies takes its forks along.
            ended = int.from_bytes(status, "little", signed=True)
            self._status = ended if status else -signal.SIGTERM
            return self._status
