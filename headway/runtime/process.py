"""Child processes: each in its own group, logged to a file, ended with everything it started."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from headway.contracts.errors import ServiceError
from headway.runtime.fork_server import ForkedProcess, ForkServer

PR_SET_PDEATHSIG = 1
POLL_S = 0.05
LOG_TAIL_LINES = 15
LOG_TAIL_BYTES = 1 << 16
STDERR = 2

_libc = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Description of a process to start."""

    name: str
    argv: Sequence[str]
    log: Path | None
    """Standard output and error are appended here; None: both go to our standard error."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""
    ready_file: Path | None = None
    """The process writes `{"url", "pid"}` here once it serves; None: it is ready at once."""
    unset: Collection[str] = ()
    """Variables of this process's environment that the child does not get."""


class StartedProcess(ABC):
    """A process of this machine or another; its log and its ready file are on a file system of ours."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec = spec
        if spec.ready_file is not None:
            spec.ready_file.unlink(missing_ok=True)

    @property
    @abstractmethod
    def pid(self) -> int:
        """Process id on its machine, which is its group's id too."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """Exit status; None while it runs; negative for a signal."""

    @abstractmethod
    def wait(self, timeout_s: float | None = None) -> int | None:
        """Exit status, or None after `timeout_s`."""

    @abstractmethod
    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the whole group."""

    @abstractmethod
    def stop(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL to the group after `grace_s`; returns when it is gone."""

    def wait_ready(self, timeout_s: float) -> str:
        """Block until the ready file is written; the URL in it.

        Raises:
            ServiceError: it ended before, or the time is over; with the end of its log.
        """
        if self.spec.ready_file is None:
            return ""
        deadline = time.monotonic() + timeout_s
        while not self.spec.ready_file.exists():
            code = self.exit_code()
            if code is not None:
                raise ServiceError(f"{self.spec.name} ended with status {code}:\n{self.log_tail()}")
            if time.monotonic() > deadline:
                raise ServiceError(
                    f"{self.spec.name} was not ready after {timeout_s:g} s:\n{self.log_tail()}"
                )
            time.sleep(POLL_S)
        return str(json.loads(self.spec.ready_file.read_text())["url"])

    def log_tail(self) -> str:
        """The last lines of its log."""
        if self.spec.log is None:
            return f"(the output of {self.spec.name} is on standard error)"
        try:
            with self.spec.log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError as error:
            return f"(its log {self.spec.log} cannot be read: {error.strerror})"
        return "\n".join(lines[-LOG_TAIL_LINES:])


class Process(StartedProcess):
    """A child; it gets SIGTERM when this process dies, however it dies."""

    def __init__(self, spec: ProcessSpec, template: ForkServer | None = None) -> None:
        """Args:
        template: what a Python module (`python -m module`) is forked from; None starts afresh.
        """
        super().__init__(spec)
        with _open_log(spec.log) as log:
            self._popen = _start(spec, log, template)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        return self._popen.poll()

    def wait(self, timeout_s: float | None = None) -> int | None:
        try:
            return self._popen.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):  # the group may be gone already
            os.killpg(self.pid, number)

    def stop(self, grace_s: float) -> None:
        if self.exit_code() is None:
            self.signal(signal.SIGTERM)
            self.wait(grace_s)
        self.signal(signal.SIGKILL)
        self._popen.wait()


def _start(
    spec: ProcessSpec, log: BinaryIO, template: ForkServer | None
) -> subprocess.Popen[bytes] | ForkedProcess:
    env = {name: value for name, value in os.environ.items() if name not in spec.unset}
    env |= spec.env
    if template is not None and list(spec.argv[:2]) == [sys.executable, "-m"]:
        return template.start(spec.argv[2], spec.argv[3:], env, log.fileno())
    return subprocess.Popen(
        spec.argv,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _open_log(path: Path | None) -> BinaryIO:
    if path is None:
        return os.fdopen(os.dup(STDERR), "wb")
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def die_with_parent() -> None:
    """Ask for SIGTERM when the parent dies (Linux); called in the child."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
