"""The process that runs untrusted programs: one at a time, each in a child of its own.

Frames over one socket, each a length of four bytes and JSON: `{"ready": true}` when the next job may
come, a job, its outcome. What a program leaves behind, processes and files, is gone before the next
job; where that fails the worker ends, and with it, under bubblewrap, its whole file system.

Programs are forked from this process, so it never sees what one of them could be after. A job's frame
holds limits alone; source, standard input and output travel by descriptors that come with it, from the
other end of the socket to the child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from gateway.sandbox.inside import confinement
from gateway.sandbox.inside.program import Limits, Settings, become_program
from gateway.sandbox.inside.usage import CgroupUsage, NamespaceUsage, ProcessUsage, Usage

PRELOAD = (
    "array bisect cmath collections copy ctypes dataclasses datetime decimal enum fractions functools "
    "hashlib heapq io itertools math numbers operator queue re statistics string textwrap time typing "
    "unicodedata"
)
WATCH_S = 0.01
"""Seconds between two looks at the CPU time and memory of all processes."""
STREAMS = 5
"""Descriptors of every job; those of its cgroup follow: `cgroup.procs` and `cpu.stat`."""
MAX_DESCRIPTORS = 8
HEADER = struct.Struct(">I")


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
    with contextlib.suppress(EOFError):  # the sender of jobs is gone
        while True:
            _send(control, {"ready": True})
            _send(control, _run(*_next_job(control), settings, control))
            _wipe(settings["scratch"])
    os._exit(0)


def _settle(settings: Settings) -> None:
    """Take from the worker itself what neither it nor a program needs."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # pid 1 ignores what it does not handle
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
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


def _run(
    limits: Limits, fds: Sequence[int], settings: Settings, control: socket.socket
) -> dict[str, Any]:
    started, cpu_before = time.monotonic(), _children_cpu()
    streams, group = fds[:STREAMS], fds[STREAMS:]
    metered = (
        CgroupUsage(group[1]) if group else None
    )  # all that the program spends comes after this
    child = os.fork()
    if child == 0:
        become_program(limits, settings, streams, group[:1])
    try:
        usage = metered or _usage_of(child, settings)
        stopped = _watch(limits, control, child, usage, started + limits["wall_s"])
    finally:
        _kill(child, settings["mode"])
    _, status, spent = os.wait4(child, 0)
    _reap(settings["mode"])
    for fd in fds:
        os.close(fd)
    return {
        "stopped": stopped,
        "exit": os.waitstatus_to_exitcode(status),
        "cpu_s": _children_cpu() - cpu_before,
        "wall_s": time.monotonic() - started,
        "max_rss_bytes": spent.ru_maxrss * 1024,
    }


def _usage_of(child: int, settings: Settings) -> Usage:
    if settings["mode"] == "bubblewrap":
        return NamespaceUsage(settings["scratch"])
    return ProcessUsage(child)


def _watch(
    limits: Limits, control: socket.socket, child: int, usage: Usage, deadline: float
) -> str | None:
    """Wait for the end of the program; why it must be stopped, or None if it ended by itself."""
    poller = select.poll()
    pidfd = os.pidfd_open(child)
    for fd in (pidfd, control.fileno()):
        poller.register(fd, select.POLLIN)
    try:
        while (left_s := deadline - time.monotonic()) > 0:
            events = dict(poller.poll(1000 * min(left_s, WATCH_S)))
            if control.fileno() in events:
                _receive(control)
                return "output"  # the reader has had enough
            if pidfd in events:
                return None
            if usage.cpu_s() > limits["cpu_s"]:
                return "cpu"
            if usage.is_beyond(limits["memory_bytes"]):
                return "memory"
        return "wall"
    finally:
        os.close(pidfd)


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


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode()
    control.sendall(HEADER.pack(len(data)) + data)


def _next_job(control: socket.socket) -> tuple[Limits, Sequence[int]]:
    """Past words to stop a job that had ended by itself: those bring no descriptors."""
    while True:
        limits, fds = _receive(control)
        if fds:
            return limits, fds


def _receive(control: socket.socket) -> tuple[Limits, Sequence[int]]:
    """A frame, and the descriptors that came with its first byte.

    Raises:
        EOFError: the other end is gone.
    """
    header, fds, _, _ = socket.recv_fds(control, HEADER.size, MAX_DESCRIPTORS)
    if not header:
        raise EOFError
    header += _read_exactly(control, HEADER.size - len(header))
    limits: Limits = json.loads(_read_exactly(control, HEADER.unpack(header)[0]))
    return limits, fds


def _read_exactly(control: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        chunk = control.recv(size - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)
