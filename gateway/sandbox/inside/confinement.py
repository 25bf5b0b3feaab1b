"""Restrictions that the worker and its programs put on themselves: identity, capabilities, files,
resources."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import struct
from collections.abc import Sequence

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP = 1, 4, 24
_PR_SET_NO_NEW_PRIVS, _PR_SET_CHILD_SUBREAPER = 38, 36
_CAPABILITY_VERSION_3, _MAX_CAPABILITY = 0x2008_0522, 63
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION, _LANDLOCK_PATH_BENEATH = 1, 1
LANDLOCK_TRUNCATE_ABI = 3
"""The first one that guards the length of files too (Linux 6.2)."""
_FS_ALL = (1 << 15) - 1  # up to TRUNCATE
_FS_READ = 1 << 2 | 1 << 3  # READ_FILE, READ_DIR
_FS_ON_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14

_libc = ctypes.CDLL(None, use_errno=True)


def become(uid: int) -> None:
    """Turn into an ordinary user for good."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


def drop_capabilities() -> None:
    """Give up all capabilities, and the way to regain them."""
    for capability in range(_MAX_CAPABILITY + 1):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails where there is none to drop
    header = ctypes.create_string_buffer(struct.pack("Ii", _CAPABILITY_VERSION_3, 0))
    _check(_libc.capset(header, ctypes.create_string_buffer(24)), "giving up capabilities")


def die_with_parent() -> None:
    """SIGKILL when the process that started this one ends. A change of user undoes it."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")


def adopt_orphans() -> None:
    """Grandchildren whose parent ended become children of this process."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "PR_SET_CHILD_SUBREAPER")


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid processes of the same user to trace this one and read its memory."""
    _check(_libc.prctl(_PR_SET_DUMPABLE, int(dumpable), 0, 0, 0), "PR_SET_DUMPABLE")


def refuse_new_privileges() -> None:
    """No later `execve` raises privileges."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")


def limit_resources(cpu_s: int, memory_bytes: int, file_bytes: int, processes: int | None) -> None:
    """Hard limits; `processes` counts those of this user, threads included."""
    wanted = {
        resource.RLIMIT_CPU: cpu_s,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: file_bytes,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if processes is not None:
        wanted[resource.RLIMIT_NPROC] = processes
    for kind, limit in wanted.items():
        hard = resource.getrlimit(kind)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, limit))


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 where there is none."""
    return max(0, int(_syscall(_LANDLOCK_CREATE_RULESET, 0, 0, _LANDLOCK_VERSION)))


def restrict_files(readable: Sequence[str], writable: str) -> None:
    """Let this process open only what is below `readable`, and anything below `writable`.

    Raises:
        OSError: the kernel has no Landlock that is new enough.
    """
    abi = landlock_abi()
    if abi < LANDLOCK_TRUNCATE_ABI:
        raise OSError(f"Landlock ABI {abi} found, {LANDLOCK_TRUNCATE_ABI} wanted")
    handled = ctypes.create_string_buffer(struct.pack("Q", _FS_ALL))
    ruleset = _check(
        _syscall(_LANDLOCK_CREATE_RULESET, ctypes.addressof(handled), 8, 0), "Landlock"
    )
    for path in readable:
        _allow(ruleset, path, _FS_READ)
    _allow(ruleset, "/dev/null", _FS_READ | 1 << 1)
    _allow(ruleset, writable, _FS_ALL & ~(1 << 6 | 1 << 9 | 1 << 11))  # no devices, no sockets
    _check(_syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0), "Landlock")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    with contextlib.suppress(FileNotFoundError):  # not every machine has every library folder
        target = os.open(path, os.O_PATH | os.O_CLOEXEC)
        if not os.path.isdir(path):
            access &= _FS_ON_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, target))
        _check(
            _syscall(
                _LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_PATH_BENEATH, ctypes.addressof(rule), 0
            ),
            f"Landlock rule for {path}",
        )
        os.close(target)


def _syscall(number: int, *args: int) -> int:
    return int(_libc.syscall(*(ctypes.c_long(value) for value in (number, *args))))


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result
