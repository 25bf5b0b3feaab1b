"""A group of processes that the kernel counts and bounds as one: cgroup v2, where a folder is ours.

Ours is what `sandbox.cgroup` names, or the group above the service's own, as systemd leaves it with
`Delegate=memory pids` and `DelegateSubgroup=`. Where there is none, the worker counts by itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from gateway.sandbox.inside.program import PROCESSES
from headway.contracts.errors import ConfigError

ROOT = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids")


class Cgroup:
    """The group of one worker's programs, one after the other."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._ooms = 0

    def make(self) -> None:
        """Make its folder.

        Raises:
            OSError: the folder above is not ours.
        """
        self._path.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def bounded(self, memory_bytes: int) -> Iterator[list[int]]:
        """Bound the next program; descriptors of `cgroup.procs`, to join, and of `cpu.stat`.

        Raises:
            OSError: the kernel refused a limit.
        """
        self._write("memory.oom.group", 1)
        self._write("memory.max", memory_bytes)
        self._write("pids.max", PROCESSES)
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            self._write("memory.swap.max", 0)
        self._ooms = self._count_ooms()
        cpu_stat = self._opened("cpu.stat", os.O_RDONLY)
        with self._opened("cgroup.procs", os.O_WRONLY) as join, cpu_stat as spent:
            yield [join, spent]

    def ran_out_of_memory(self) -> bool:
        """True if the kernel ended the program because its group ran out of memory."""
        return self._count_ooms() > self._ooms

    def remove(self) -> None:
        """End what is in it, and the group, unless the kernel is not done with it."""
        with contextlib.suppress(OSError):
            self._write("cgroup.kill", 1)
        with contextlib.suppress(OSError):
            self._path.rmdir()

    def _write(self, name: str, value: int) -> None:
        with self._opened(name, os.O_WRONLY) as file:
            os.write(file, str(value).encode())

    @contextlib.contextmanager
    def _opened(self, name: str, flags: int) -> Iterator[int]:
        """A file of the kernel's, which is there or not."""
        file = os.open(self._path / name, flags | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)

    def _count_ooms(self) -> int:
        lines = (self._path / "memory.events").read_text().split("\n")
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def find_parent(named: str | None) -> Path | None:
    """The folder in which groups may be made; None where there is none.

    Args:
        named: what the config says; None looks above the service's own group.
    Raises:
        ConfigError: the folder that is named is none.
    """
    parent = _above_own() if named is None else Path(named)
    if parent is None:
        return None
    try:
        _enable(parent)
    except OSError as error:
        if named is None:
            return None
        raise ConfigError(
            f"sandbox.cgroup={named} is no folder of cgroup v2 in which this service may make groups "
            f"({error}); delegate one with the controllers {', '.join(CONTROLLERS)}, or leave it out"
        ) from error
    return parent


def _enable(parent: Path) -> None:
    """Have memory and processes counted in the groups of a folder."""
    control = parent / "cgroup.subtree_control"
    if not set(CONTROLLERS) <= set(control.read_text().split()):
        control.write_text(" ".join(f"+{name}" for name in CONTROLLERS))


def _above_own() -> Path | None:
    """Return the folder that systemd marks as delegated to us; one without the mark is somebody
    else's."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "/")
        parent = (ROOT / own.lstrip("/")).parent
        if own != "/" and os.getxattr(parent, "user.delegate") == b"1":
            return parent
    return None
