"""Resources that the processes of a job have used so far: CPU time and memory of all of them
together.

Three ways to know, by what there is: a cgroup (`CgroupUsage`); the sum over `/proc` of a pid namespace
(`NamespaceUsage`); the clock of the only process, whose memory the kernel bounds (`ProcessUsage`). The
sum is honest because `syscalls` refuses what it could not see: shared memory without a file, and children
whose CPU time no parent collects.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Protocol

CPUCLOCK_SCHED = 2
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
INODE_BYTES = 5 << 10
"""Maximum kernel memory of an inode, in bytes: an empty file, or a symbolic link with a long
target."""


class Usage(Protocol):
    """Resources used by one job, from its start."""

    def cpu_s(self) -> float:
        """CPU seconds, of processes that have ended too."""

    def is_beyond(self, memory_bytes: int) -> bool:
        """True if the job holds more memory than this, its files included."""


class ProcessUsage:
    """Usage of one process that cannot start others; its address space is limited by the kernel."""

    def __init__(self, child: int) -> None:
        self._clock = ~child << 3 | CPUCLOCK_SCHED  # clock_getcpuclockid(3)

    def cpu_s(self) -> float:
        return time.clock_gettime(self._clock)

    def is_beyond(self, memory_bytes: int) -> bool:
        return False


class NamespaceUsage:
    """Usage of all processes of a pid namespace except its first, which runs one job at a time."""

    def __init__(self, scratch: str) -> None:
        self._scratch = scratch

    def cpu_s(self) -> float:
        return sum(map(_cpu_s, _pids()))

    def is_beyond(self, memory_bytes: int) -> bool:
        files = _bytes_of_files(self._scratch)
        if files + sum(map(_private_bytes, _pids())) <= memory_bytes:
            return False
        # Looked at closely: what processes share since a fork counts once.
        return files + sum(map(_proportional_bytes, _pids())) > memory_bytes


class CgroupUsage:
    """Usage of a cgroup, which bounds the memory by itself."""

    def __init__(self, cpu_stat: int) -> None:
        """Args:
        cpu_stat: the open file `cpu.stat` of the group.
        """
        self._cpu_stat = cpu_stat
        self._before_s = self._read_s()

    def cpu_s(self) -> float:
        return self._read_s() - self._before_s

    def is_beyond(self, memory_bytes: int) -> bool:
        return False

    def _read_s(self) -> float:
        return _number_after(b"usage_usec ", os.pread(self._cpu_stat, 4096, 0)) / 1e6


def _pids() -> Iterator[str]:
    return (name for name in os.listdir("/proc") if name.isdecimal() and name != "1")


def _cpu_s(pid: str) -> float:
    """Return CPU time with that of the children it has waited for; a process that is not waited for
    can still be read."""
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return sum(map(int, fields[11:15])) / TICKS_PER_S


def _private_bytes(pid: str) -> int:
    """Pages of its own, among them those that it still shares with whom it was forked from."""
    text = _read(pid, "status")
    return sum(_number_after(name, text) for name in (b"\nRssAnon:", b"\nVmSwap:")) << 10


def _proportional_bytes(pid: str) -> int:
    """The same, a page that several processes share in parts; all of it where a process hides that."""
    text = _read(pid, "smaps_rollup")
    if not text:
        return _private_bytes(pid)
    return sum(_number_after(name, text) for name in (b"\nPss_Anon:", b"\nSwapPss:")) << 10


def _bytes_of_files(folder: str) -> int:
    used = os.statvfs(folder)
    num_files = used.f_files - used.f_ffree
    return (used.f_blocks - used.f_bfree) * used.f_frsize + num_files * INODE_BYTES


def _read(pid: str, name: str) -> bytes:
    """Empty for a process that has ended meanwhile."""
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except OSError:
        return b""


def _number_after(name: bytes, text: bytes) -> int:
    number = text.partition(name)[2].split(None, 1)[:1]
    return int(number[0]) if number else 0
