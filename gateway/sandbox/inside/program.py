"""A program's own process, forked from a worker that has seen no program before: its first steps.

What it runs arrives by descriptors and is read here, in the child alone.
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from gateway.sandbox.inside import confinement, syscalls
from gateway.sandbox.inside.execute import execute

PROCESSES = 16
"""Maximum number of processes of one job, threads included."""
FILE_BYTES = 8 << 20
STDIN, STDOUT, STDERR, REPORT, SOURCE = range(5)

Settings = dict[str, Any]
Limits = dict[str, Any]


def become_program(
    limits: Limits, settings: Settings, fds: Sequence[int], joins: Sequence[int]
) -> NoReturn:
    """Shed everything and run the program; called in the child.

    Args:
        fds: its standard streams, where it reports, and where its source is read.
        joins: the open file `cgroup.procs` of the group that it joins, if there is one.
    """
    code = 1
    try:
        for group in joins:
            os.write(group, b"0")
        _rewire(fds)
        os.setsid()
        confinement.set_dumpable(True)
        with open(SOURCE, encoding="utf-8") as file:
            program = json.load(file)
        _confine(limits, settings["mode"])
        random.seed()
        code = execute(program["source"], program["calls"], _emit)
    finally:
        os._exit(code)


def _confine(limits: Limits, mode: str) -> None:
    if mode != "bubblewrap":
        confinement.die_with_parent()
    confinement.limit_resources(
        # Of each process, by the kernel's coarse clock: behind the worker's own watch.
        cpu_s=int(limits["cpu_s"]) + 2,
        memory_bytes=limits["memory_bytes"],
        file_bytes=FILE_BYTES,
        processes=PROCESSES if mode == "bubblewrap" else None,
    )
    if mode != "unsafe" and syscalls.is_supported():
        syscalls.forbid(alone=mode == "landlock")


def _rewire(fds: Sequence[int]) -> None:
    """Make these the descriptors 0, 1, 2, ... and close all others."""
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
    view = memoryview(json.dumps(message).encode() + b"\n")
    while view:
        view = view[os.write(REPORT, view) :]
