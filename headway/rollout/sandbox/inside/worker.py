"""The process that runs untrusted programs: one at a time, each in a child of its own.

Frames over one socket, each a length of four bytes and JSON: `{"ready": true}` when the next job may
come, a job, its outcome. What a program leaves behind, processes and files, is gone before the next
job; where that fails the worker ends, and with it, under bubblewrap, its whole file system.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time
from typing import Any, NoReturn

from headway.rollout.sandbox.inside import confinement, syscalls
from headway.rollout.sandbox.inside.play import play

PRELOAD = (
    "array bisect cmath collections copy ctypes dataclasses datetime decimal enum fractions functools "
    "hashlib heapq io itertools math numbers operator queue re statistics string textwrap time typing "
    "unicodedata"
)
PROCESSES = 16
"""Of one job, threads included."""
FILE_BYTES = 8 << 20
WATCH_S = 0.05
"""How often CPU time and the memory of all processes are looked at."""
CPUCLOCK_SCHED = 2
HEADER = struct.Struct(">I")
STDIN, STDOUT, STDERR, REPORT = 0, 1, 2, 3

Settings = dict[str, Any]
Job = dict[str, Any]


def main(arguments: str) -> NoReturn:
    """Serve jobs on the socket that stands in for standard input, until its other end closes."""
    settings: Settings = json.loads(arguments)
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    for name in PRELOAD.split():
        importlib.import_module(name)
    _settle(settings)
    gc.collect()
    gc.freeze()
    while True:
        _send(control, {"ready": True})
        job = _receive(control)
        _send(control, _run(job, settings, control))
        _wipe(settings["scratch"])


def _settle(settings: Settings) -> None:
    """Take from the worker itself what neither it nor a program needs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 ignores what it does not handle
    if settings["mode"] == "bubblewrap":
        if os.getpid() != 1:
            raise SystemExit("this worker is not pid 1; a job's processes could not be ended")
        if settings["uid"] is not None:
            confinement.become(settings["uid"])
    else:
        confinement.adopt_orphans()
    confinement.refuse_new_privileges()
    confinement.die_with_parent()
    os.chdir(settings["scratch"])
    if settings["mode"] == "landlock":
        if os.getuid() == 0:
            confinement.drop_capabilities()
        confinement.restrict_files(settings["readable"], settings["scratch"])
    confinement.set_dumpable(False)


def _run(job: Job, settings: Settings, control: socket.socket) -> dict[str, Any]:
    started, cpu_before = time.monotonic(), _children_cpu()
    pipes = {stream: os.pipe() for stream in (STDOUT, STDERR, REPORT)}
    stdin = os.memfd_create("stdin")
    _write_all(stdin, job["stdin"].encode("utf-8", "surrogatepass"))
    os.lseek(stdin, 0, os.SEEK_SET)
    child = os.fork()
    if child == 0:
        _become_program(job, settings, [stdin, *(pipes[s][1] for s in (STDOUT, STDERR, REPORT))])
    os.close(stdin)
    outputs = {}
    for stream, (reader, writer) in pipes.items():
        os.close(writer)
        os.set_blocking(reader, False)
        outputs[stream] = Output(reader, 4 * job["max_output_chars"])
    stopped = _watch(job, settings, control, child, outputs, started)
    _kill(child, settings["mode"])
    _, status, usage = os.wait4(child, 0)
    _reap(settings["mode"])
    for output in outputs.values():
        output.drain()
    texts = {stream: output.text(job["max_output_chars"]) for stream, output in outputs.items()}
    if stopped is None and any(output.is_over for output in outputs.values()):
        stopped = "output"
    return {
        "stopped": stopped,
        "exit": os.waitstatus_to_exitcode(status),
        "stdout": texts[STDOUT],
        "stderr": texts[STDERR],
        "report": texts[REPORT],
        "cpu_s": _children_cpu() - cpu_before,
        "wall_s": time.monotonic() - started,
        "max_rss_bytes": usage.ru_maxrss * 1024,
    }


class Output:
    """What a program wrote to one pipe, up to a limit."""

    def __init__(self, reader: int, limit: int) -> None:
        self.reader = reader
        self.is_over = False
        self._limit = limit
        self._chunks: list[bytes] = []
        self._size = 0

    def read(self) -> bool:
        """Take what is there; false at its end."""
        try:
            chunk = os.read(self.reader, 1 << 16)
        except BlockingIOError:
            return True
        self._chunks.append(chunk)
        self._size += len(chunk)
        self.is_over |= self._size > self._limit
        return bool(chunk)

    def drain(self) -> None:
        """Take the rest, once nobody can write any more."""
        os.set_blocking(self.reader, True)
        while not self.is_over and self.read():
            pass
        os.close(self.reader)

    def text(self, max_chars: int) -> str:
        """As text; cut, and then over, past so many characters."""
        text = b"".join(self._chunks).decode("utf-8", "replace")
        self.is_over |= len(text) > max_chars
        return text[:max_chars]


def _watch(
    job: Job,
    settings: Settings,
    control: socket.socket,
    child: int,
    outputs: dict[int, Output],
    started: float,
) -> str | None:
    """Wait for the end of the program; why it must be stopped, or None if it ended by itself."""
    poller = select.poll()
    pidfd = os.pidfd_open(child)
    by_reader = {output.reader: output for output in outputs.values()}
    for fd in (pidfd, control.fileno(), *by_reader):
        poller.register(fd, select.POLLIN)
    try:
        while True:
            left_s = started + job["wall_s"] - time.monotonic()
            if left_s <= 0:
                return "wall"
            events = dict(poller.poll(1000 * min(left_s, WATCH_S)))
            if control.fileno() in events:  # nothing is sent during a job: the other end is gone
                _kill(child, settings["mode"])
                os._exit(0)
            for reader in by_reader.keys() & events.keys():
                if not by_reader[reader].read():
                    poller.unregister(reader)
                if by_reader[reader].is_over:
                    return "output"
            if pidfd in events:
                return None
            if _cpu_of(child) > job["cpu_s"]:
                return "cpu"
            can_fork = settings["mode"] == "bubblewrap"
            if can_fork and not events and _memory_of_all() > job["memory_bytes"]:
                return "memory"
    finally:
        os.close(pidfd)


def _cpu_of(child: int) -> float:
    """CPU seconds of a process and its threads, by its own clock (clock_getcpuclockid(3))."""
    return time.clock_gettime(~child << 3 | CPUCLOCK_SCHED)


def _memory_of_all() -> int:
    """Bytes that the processes of the job hold for themselves; shared pages of the worker count once
    per process."""
    pages = 0
    for name in os.listdir("/proc"):
        if name.isdecimal() and name != "1":
            try:
                with open(f"/proc/{name}/statm") as file:
                    _, resident, shared, *_ = map(int, file.read().split())
            except (OSError, ValueError):  # it ended meanwhile
                continue
            pages += resident - shared
    return pages * resource.getpagesize()


def _become_program(job: Job, settings: Settings, fds: list[int]) -> NoReturn:
    """In the child: shed everything, and run the program."""
    code = 1
    try:
        _rewire(fds)
        os.setsid()
        confinement.set_dumpable(True)
        alone = settings["mode"] == "landlock"
        if settings["mode"] != "bubblewrap":
            confinement.die_with_parent()
        confinement.limit_resources(
            # Of each process, by the kernel's coarse clock: behind our own watch.
            cpu_s=int(job["cpu_s"]) + 2,
            memory_bytes=job["memory_bytes"],
            file_bytes=FILE_BYTES,
            processes=PROCESSES if settings["mode"] == "bubblewrap" else None,
        )
        if settings["mode"] != "unsafe" and syscalls.is_supported():
            syscalls.forbid(alone)
        random.seed()
        code = play(job["source"], job["calls"], _emit)
    finally:
        os._exit(code)


def _rewire(fds: list[int]) -> None:
    """Make these the descriptors 0, 1, 2, 3 and close all others."""
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 100) for fd in fds]
    for number, fd in enumerate(high):
        os.dup2(fd, number)
    os.closerange(len(fds), 1024)
    sys.stdin = sys.__stdin__ = _open(STDIN, "r")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _open(STDOUT, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _open(STDERR, "w", buffering=1)  # type: ignore[misc]


def _open(fd: int, mode: str, buffering: int = -1) -> Any:
    return open(fd, mode, buffering, encoding="utf-8", errors="surrogateescape")


def _emit(message: dict[str, Any]) -> None:
    _write_all(REPORT, json.dumps(message).encode() + b"\n")


def _kill(child: int, mode: str) -> None:
    """End every process of the job."""
    if mode == "bubblewrap":  # of this pid namespace, in which we are pid 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
    else:
        os.kill(child, signal.SIGKILL)
        if mode == "unsafe":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)


def _reap(mode: str) -> None:
    """Collect the other processes of a job."""
    while True:
        if mode == "unsafe":  # orphans that left the group were adopted by us
            with open(f"/proc/self/task/{os.getpid()}/children") as file:
                for pid in map(int, file.read().split()):
                    os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _wipe(folder: str) -> None:
    """Empty the scratch folder; a worker that cannot ends."""
    try:
        for entry in list(os.scandir(folder)):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
    except (OSError, RecursionError):
        os._exit(1)


def _children_cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    control.sendall(HEADER.pack(len(data)) + data)


def _receive(control: socket.socket) -> Job:
    (length,) = HEADER.unpack(_read_exactly(control, HEADER.size))
    job: Job = json.loads(_read_exactly(control, length))
    return job


def _read_exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = control.recv(size - len(data))
        if not chunk:
            os._exit(0)  # nobody sends jobs any more
        data += chunk
    return bytes(data)
