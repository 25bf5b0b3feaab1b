"""`python -m gateway.rewards.worker_fork_server FD`: the process that workers are forked from.

It has no threads and imports heavy modules once, so that a worker starts in milliseconds however fat
the gateway is. Each request brings a socket for the worker and names modules to import first; the answer
is the worker's process id. When the gateway goes away, it kills the workers and ends.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

from gateway.rewards.worker import serve

PID_BYTES = 8


def main(control: socket.socket) -> None:
    """Fork workers until the other end is closed."""
    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not message:
            break
        _reap(workers)
        request = json.loads(message)
        _preload(request["modules"])
        connection = socket.socket(fileno=descriptors[0])
        pid = os.fork()
        if pid == 0:
            control.close()
            _run_worker(connection, request["memory_bytes"])
        connection.close()
        workers.add(pid)
        control.sendall(pid.to_bytes(PID_BYTES, "big"))
    for pid in workers:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _run_worker(connection: socket.socket, memory_bytes: int) -> None:
    status = 1
    try:
        serve(connection, memory_bytes)
        status = 0
    finally:
        os._exit(status)  # nothing of the template's is to be run at the end


def _preload(modules: Iterable[str]) -> None:
    for module in modules:
        with suppress(Exception):  # code that needs it imports it again, and reports the error
            importlib.import_module(module)


def _reap(workers: set[int]) -> None:
    """Forget those that ended; their ids are not given to others before."""
    for pid in list(workers):
        with suppress(ChildProcessError):
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended:
                workers.discard(pid)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
