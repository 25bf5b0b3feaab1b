"""`python -m headway.runtime.fork_server_process FD MODULE…`: imports modules, then forks on request.

One thread, one request after another. The parent keeps the loop and reaps what ended; a child leaves
the loop with its request, and becomes `python -m module`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

from setproctitle import getproctitle, setproctitle

from headway.runtime.ending import end_process
from headway.runtime.fork_server import MAX_REQUEST_BYTES, STATUS_BYTES
from headway.runtime.process import die_with_parent

STDIN, STDOUT, STDERR = 0, 1, 2


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """A process that somebody wants."""

    module: str
    arguments: list[str]
    env: dict[str, str]
    cwd: str


def serve(channel: socket.socket) -> tuple[ForkRequest, int] | None:
    """Fork for every request.

    Returns:
        In a child, its request and the descriptor of its log; None once there is no caller any more.
    """
    selector = selectors.DefaultSelector()
    selector.register(channel, selectors.EVENT_READ)
    running: dict[int, tuple[int, int]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd != channel.fileno():
                pid, pipe = running.pop(key.fd)
                selector.unregister(key.fd)
                os.close(key.fd)
                _report(pipe, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                os.close(pipe)
                continue
            message, fds, _, _ = socket.recv_fds(channel, MAX_REQUEST_BYTES, 2)
            if not message:
                return None
            pipe, log = fds
            try:
                pid = os.fork()
            except OSError:  # no memory, or too many processes: the caller sees the pipe's end
                os.close(pipe)
                os.close(log)
                continue
            if pid == 0:
                os.setsid()
                _report(pipe, os.getpid())  # from here on its group can be signalled
                selector.close()
                for fd in (channel.detach(), pipe, *running, *(p for _, p in running.values())):
                    os.close(fd)
                return ForkRequest(**json.loads(message)), log
            os.close(log)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = (pid, pipe)
            selector.register(pidfd, selectors.EVENT_READ)


def become(request: ForkRequest, log: int, is_usable: bool) -> NoReturn:
    """Be `python -m module`.

    Args:
        is_usable: whether what was imported may be used; otherwise the interpreter starts afresh.
    """
    die_with_parent()
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, STDIN), (log, STDOUT), (log, STDERR)):
        os.dup2(source, target)
    os.close(null)
    os.close(log)
    os.environ.clear()
    os.environ.update(request.env)
    os.chdir(request.cwd)
    command = [sys.executable, "-m", request.module, *request.arguments]
    if not is_usable:
        os.execve(sys.executable, command, request.env)
    setproctitle(" ".join(command))
    _follow_environment(request.env)
    sys.argv = [request.module, *request.arguments]
    try:
        runpy.run_module(request.module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        end_process(end.code or 0)
    end_process(0)


def _can_be_forked() -> bool:
    """True if no import did what a fork cannot take over: start threads, or use a GPU."""
    torch: Any = sys.modules.get("torch")
    has_context = torch is not None and torch.cuda.is_initialized()
    return not has_context and len(os.listdir("/proc/self/task")) == 1


def _follow_environment(env: dict[str, str]) -> None:
    """Apply what libraries read from the environment when they are imported."""
    for folder in reversed(env.get("PYTHONPATH", "").split(os.pathsep)):
        if folder and folder not in sys.path:
            sys.path.insert(0, folder)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        wanted = env.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(wanted) if wanted.isdigit() else len(os.sched_getaffinity(0)))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()  # else every fork would draw alike; `random` sees to it by itself


def _report(pipe: int, number: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # there is no caller any more
        os.write(pipe, number.to_bytes(STATUS_BYTES, "little", signed=True))


def _preload(modules: list[str]) -> None:
    gc.disable()  # nothing that an import makes is garbage
    for module in modules:
        with contextlib.suppress(ImportError):
            import_module(module)
    gc.enable()
    gc.freeze()  # a collection in a fork would copy every page


def main() -> None:
    """Import, say so, and fork until the other end of the socket is closed."""
    heed_interrupts = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's
    channel = socket.socket(fileno=int(sys.argv[1]))
    getproctitle()  # finds the command line's memory, which a changed environment hides
    _preload(sys.argv[2:])
    is_usable = _can_be_forked()
    try:
        channel.send(b"\0")
        forked = serve(channel)
    except (BrokenPipeError, ConnectionResetError):
        return  # who asked is gone
    if forked is not None:
        signal.signal(signal.SIGINT, heed_interrupts)
        become(*forked, is_usable)


if __name__ == "__main__":
    main()
