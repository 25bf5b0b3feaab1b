"""Sandbox backends of this machine, and how a worker is started in each."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import headway

INSIDE = "gateway/sandbox/inside"
SCRATCH_BYTES = 64 << 20
BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from gateway.sandbox.inside.worker import main; del sys.path[0]; main(sys.argv[2])"
)
_ROOT = Path(headway.__file__).parents[1]
_LIBRARIES = ("/bin", "/sbin", "/lib", "/lib32", "/lib64")


class Unavailable(Exception):
    """This back-end cannot work here; the text says why."""


@dataclass(frozen=True, slots=True)
class SandboxCommand:
    """Command that starts one worker."""

    argv: list[str]
    scratch: str | None = None
    """A folder of this machine to remove when the worker is gone."""


@dataclass(frozen=True, slots=True)
class Backend:
    """One way to hold untrusted programs."""

    name: str
    covers: str
    lacks: str
    """Things that a program can still do."""
    command: Callable[[], SandboxCommand]
    """Raises Unavailable."""


def bubblewrap_command() -> SandboxCommand:
    """A worker as pid 1 of namespaces of its own, as a user of its own."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise Unavailable("bwrap is not installed (Debian package bubblewrap)")
    is_root = os.getuid() == 0
    argv = [bwrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    argv += ["--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1", "--die-with-parent"]
    argv += ["--new-session", "--clearenv", "--cap-drop", "ALL"]
    if is_root:  # to become the worker's user, and given up with that
        argv += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        argv += ["--unshare-user"]
    python, folders = _python_inside()
    argv += [*_system_folders(), *folders]
    argv += ["--ro-bind", str(_ROOT / INSIDE), f"/worker/{INSIDE}"]
    argv += ["--proc", "/proc", "--dev", "/dev"]
    # It reads as zeros, too, but cannot be mapped as memory that is not counted.
    argv += ["--dev-bind", "/dev/full", "/dev/zero", "--remount-ro", "/dev"]
    argv += ["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs", "/tmp"]
    argv += ["--remount-ro", "/", "--chdir", "/tmp"]
    settings = {
        "mode": "bubblewrap",
        "scratch": "/tmp",
        "uid": _unused_uid() if is_root else None,
    }
    return SandboxCommand([*argv, *_worker(python, "/worker", settings)])


def landlock_command() -> SandboxCommand:
    """A worker that restricts itself to reading Python and to a scratch folder."""
    python, folder = _base_python(), tempfile.mkdtemp(prefix="headway-sandbox-")
    readable = [sys.base_prefix, "/usr", *_LIBRARIES, "/dev/urandom", "/dev/random"]
    settings = {"mode": "landlock", "scratch": folder, "readable": readable}
    return SandboxCommand(_worker(python, str(_ROOT), settings), folder)


def unsafe_command() -> SandboxCommand:
    """A worker with resource limits only."""
    python, folder = _base_python(), tempfile.mkdtemp(prefix="headway-sandbox-")
    settings = {"mode": "unsafe", "scratch": folder}
    return SandboxCommand(_worker(python, str(_ROOT), settings), folder)


BUBBLEWRAP = Backend(
    "bubblewrap",
    covers="files, network, processes, signals, memory, CPU, output, what a program leaves behind",
    lacks="reading /usr; kernel memory that no limit counts (locks, pipes); flaws of the kernel",
    command=bubblewrap_command,
)
LANDLOCK = Backend(
    "landlock",
    covers="content of files, network, further processes (refused), signals, memory, CPU, output",
    lacks="names and sizes of files may be seen; disk space in the scratch folder; flaws of the kernel",
    command=landlock_command,
)
UNSAFE = Backend(
    "unsafe",
    covers="memory of one process, CPU, size of one file, output",
    lacks="a program can read and delete files, use the network and start processes",
    command=unsafe_command,
)


def _worker(python: str, root: str, settings: Mapping[str, object]) -> list[str]:
    flags = ["-I", "-S", "-B", "-X", "utf8"]
    return [python, *flags, "-c", BOOTSTRAP, root, json.dumps(settings)]


def _base_python() -> str:
    """This interpreter outside of any virtual environment."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    path = os.path.join(sys.base_prefix, "bin", version)
    if not os.path.exists(path):
        raise Unavailable(f"{path} does not exist; the interpreter's own files are needed")
    return path


def _python_inside() -> tuple[str, list[str]]:
    """Return the interpreter's path inside bubblewrap, and the paths that must be bound for it."""
    python = _base_python()
    if Path(sys.base_prefix).is_relative_to("/usr"):
        return python, []
    folders = [
        "--ro-bind",
        sys.base_prefix,
        "/python",
        "--setenv",
        "LD_LIBRARY_PATH",
        "/python/lib",
    ]
    return f"/python/bin/{os.path.basename(python)}", folders


def _system_folders() -> list[str]:
    argv = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    for path in _LIBRARIES:
        if os.path.islink(path):
            argv += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            argv += ["--ro-bind", path, path]
    return argv


def _unused_uid() -> int:
    """A user that no other process has: limits on processes count per user, machine-wide.

    Drawn from the upper half of what this user namespace maps, where no account lives.
    """
    with open("/proc/self/uid_map") as file:
        ranges = [(int(line.split()[2]), int(line.split()[0])) for line in file]
    count, start = max(ranges)
    if count < 1 << 16:
        raise Unavailable(f"this user namespace maps {count} users only, no spare one")
    high = min(count, 1 << 31)
    return start + random.SystemRandom().randrange(high // 2, high - 2048)
