"""A seccomp filter, built by hand: which system calls an untrusted program may not make.

Covered on x86_64 and aarch64 (`is_supported`); calls of a foreign architecture end the process. A
refused call fails with EPERM, `clone3` with ENOSYS so that the C library falls back to `clone`, whose
flags a filter can see.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

_BOTH = {
    # Newer calls have one number everywhere.
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426,
    "io_uring_register": 427, "pidfd_open": 434, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "memfd_secret": 447, "process_mrelease": 448, "fchmodat2": 452,
    "setxattrat": 463, "removexattrat": 466,
}  # fmt: skip
_X86_64 = {
    "mmap": 9, "rt_sigaction": 13, "shmget": 29, "shmat": 30, "socket": 41, "setsockopt": 54,
    "clone": 56, "fork": 57,
    "vfork": 58, "execve": 59,
    "kill": 62, "semget": 64, "msgget": 68, "chmod": 90, "fchmod": 91, "chown": 92, "fchown": 93,
    "lchown": 94, "ptrace": 101, "rt_sigqueueinfo": 129, "utime": 132, "setpriority": 141,
    "sched_setparam": 142, "sched_setscheduler": 144, "prctl": 157, "setxattr": 188,
    "lsetxattr": 189, "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198,
    "fremovexattr": 199, "tkill": 200, "sched_setaffinity": 203, "tgkill": 234, "utimes": 235,
    "mq_open": 240, "add_key": 248, "request_key": 249, "keyctl": 250, "ioprio_set": 251,
    "migrate_pages": 256, "vmsplice": 278, "memfd_create": 319, "fchownat": 260,
    "futimesat": 261, "fchmodat": 268, "unshare": 272,
    "move_pages": 279, "utimensat": 280, "rt_tgsigqueueinfo": 297, "perf_event_open": 298,
    "prlimit64": 302, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311,
    "kcmp": 312, "sched_setattr": 314, "bpf": 321, "execveat": 322, "userfaultfd": 323,
}  # fmt: skip
_AARCH64 = {
    "setxattr": 5, "lsetxattr": 6, "fsetxattr": 7, "removexattr": 14, "lremovexattr": 15,
    "fremovexattr": 16, "ioprio_set": 30, "fchmod": 52, "fchmodat": 53, "fchownat": 54,
    "fchown": 55, "vmsplice": 75, "utimensat": 88, "unshare": 97, "ptrace": 117, "sched_setparam": 118,
    "sched_setscheduler": 119, "sched_setaffinity": 122, "kill": 129, "tkill": 130, "tgkill": 131,
    "rt_sigaction": 134, "rt_sigqueueinfo": 138, "setpriority": 140, "prctl": 167,
    "mq_open": 180, "msgget": 186, "semget": 190, "shmget": 194, "shmat": 196, "socket": 198,
    "setsockopt": 208,
    "add_key": 217, "request_key": 218,
    "keyctl": 219, "mmap": 222, "memfd_create": 279, "clone": 220, "execve": 221,
    "migrate_pages": 238, "move_pages": 239, "rt_tgsigqueueinfo": 240, "perf_event_open": 241,
    "prlimit64": 261, "setns": 268,
    "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "sched_setattr": 274,
    "bpf": 280, "execveat": 281, "userfaultfd": 282,
}  # fmt: skip
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _AARCH64)}

_DENIED = (
    # New namespaces, and with them new privileges.
    "unshare", "setns",
    # What belongs to another process, foremost to the worker.
    "ptrace", "process_vm_readv", "process_vm_writev", "process_madvise", "process_mrelease",
    "kcmp", "migrate_pages", "move_pages", "setpriority", "sched_setparam", "sched_setscheduler",
    "sched_setaffinity", "sched_setattr", "ioprio_set", "pidfd_open", "pidfd_getfd",
    "pidfd_send_signal",
    # What outlives the program.
    "shmget", "shmat", "semget", "msgget", "mq_open", "add_key", "request_key", "keyctl",
    # Memory that no process shows as its own; see also `_shared_without_file`.
    "memfd_create", "memfd_secret", "vmsplice", "socket",
    # Wide doors into the kernel.
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter",
    "io_uring_register",
)  # fmt: skip
_DENIED_ALONE = (
    "fork", "vfork", "execve", "execveat", "tkill", "rt_sigqueueinfo",
    "rt_tgsigqueueinfo", "chmod", "fchmod", "fchmodat", "fchmodat2", "chown", "fchown", "lchown",
    "fchownat", "utime", "utimes", "futimesat", "utimensat", "setxattr", "lsetxattr", "fsetxattr",
    "setxattrat", "removexattr", "lremovexattr", "fremovexattr", "removexattrat",
)  # fmt: skip

_MAP_SHARED_ANONYMOUS = 0x01 | 0x20
_SIGCHLD = 17
_SO_SNDBUF, _SO_SNDBUFFORCE = 7, 32
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 22, 2
_CLONE_THREAD, _CLONE_NEW = 0x0001_0000, 0x7E02_0000
_LOAD, _AND, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_NUMBER, _ARCH, _FIRST_ARG, _SECOND_ARG, _THIRD_ARG, _FOURTH_ARG = 0, 4, 16, 24, 32, 40
# Offsets in struct seccomp_data; of arguments, to the low half.
_X32 = 0x4000_0000


def is_supported() -> bool:
    """True if the numbers of this machine's system calls are known."""
    return os.uname().machine in _MACHINES


def forbid(alone: bool) -> None:
    """Load the filter into the calling process; it cannot be undone, and children inherit it.

    Args:
        alone: also forbid further processes, signals to others, sockets and the change of attributes
            of files, for where no namespace keeps these apart.
    """
    program = _build(alone)
    instructions = ctypes.create_string_buffer(program)
    fprog = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(fprog), 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "the seccomp filter was refused")


def _build(alone: bool) -> bytes:
    arch, numbers = _MACHINES[os.uname().machine]
    numbers = {**_BOTH, **numbers}
    deny = _ERRNO | errno.EPERM
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, 0, 1, _X32),
        (_RETURN, 0, 0, deny),
        *_when(numbers["clone3"], _ERRNO | errno.ENOSYS),
    ]
    for name in _DENIED + (_DENIED_ALONE if alone else ()):
        if name in numbers:  # fork, chmod and the like do not exist on newer machines
            code += _when(numbers[name], deny)
    code += _shared_without_file(numbers["mmap"], deny)
    code += _large_buffers(numbers["setsockopt"], deny)
    code += _unless_argument(numbers["prlimit64"], 0, deny)
    if alone:
        code += _clone(numbers["clone"], _CLONE_THREAD, wanted=True)
        code += _unless_argument(numbers["kill"], os.getpid(), deny)
        code += _unless_argument(numbers["tgkill"], os.getpid(), deny)
        code += _if_argument(numbers["prctl"], _PR_SET_PDEATHSIG, deny)
    else:
        code += _clone(numbers["clone"], _CLONE_NEW, wanted=False)
        code += _unwaited_children(numbers["rt_sigaction"], deny)
    code.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in code)


Instruction = tuple[int, int, int, int]  # opcode, jump if true, jump if false, operand


def _when(number: int, answer: int) -> list[Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]


def _unless_argument(number: int, value: int, answer: int) -> list[Instruction]:
    """Refuse the call, unless the low half of its first argument is `value`."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARG),
        (_EQUAL, 1, 0, value),
        (_RETURN, 0, 0, answer),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _if_argument(number: int, value: int, answer: int) -> list[Instruction]:
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARG),
        (_EQUAL, 0, 1, value),
        (_RETURN, 0, 0, answer),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _shared_without_file(number: int, answer: int) -> list[Instruction]:
    """Refuse a mapping that is shared and anonymous: its pages stay when no process maps them."""
    return [
        (_EQUAL, 0, 5, number),
        (_LOAD, 0, 0, _FOURTH_ARG),
        (_AND, 0, 0, _MAP_SHARED_ANONYMOUS),
        (_EQUAL, 0, 1, _MAP_SHARED_ANONYMOUS),
        (_RETURN, 0, 0, answer),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _large_buffers(number: int, answer: int) -> list[Instruction]:
    """Refuse to change how much a pair of sockets holds: the kernel's default times their number."""
    return [
        (_EQUAL, 0, 5, number),
        (_LOAD, 0, 0, _THIRD_ARG),
        (_EQUAL, 1, 0, _SO_SNDBUF),
        (_EQUAL, 0, 1, _SO_SNDBUFFORCE),
        (_RETURN, 0, 0, answer),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _unwaited_children(number: int, answer: int) -> list[Instruction]:
    """Refuse to set what happens on SIGCHLD: if it is ignored, children vanish with their CPU time.

    To ask what is set (a null pointer) stays allowed.
    """
    return [
        (_EQUAL, 0, 8, number),
        (_LOAD, 0, 0, _FIRST_ARG),
        (_EQUAL, 0, 5, _SIGCHLD),
        (_LOAD, 0, 0, _SECOND_ARG),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, _SECOND_ARG + 4),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, answer),
        (_LOAD, 0, 0, _NUMBER),
    ]


def _clone(number: int, flags: int, *, wanted: bool) -> list[Instruction]:
    """Refuse `clone` without any of these flags (wanted), or with one of them."""
    return [
        (_EQUAL, 0, 4, number),
        (_LOAD, 0, 0, _FIRST_ARG),
        (_ANY_BIT, int(wanted), int(not wanted), flags),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
    ]
