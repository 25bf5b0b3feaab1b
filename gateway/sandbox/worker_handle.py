"""The gateway's end of one sandbox worker: a child process behind a socket pair.

No thread and no `preexec_fn`: the child is started by vfork, which costs the same however much memory
this process holds. A worker that is late, silent or incoherent is killed; it is never asked twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import IO, Any

from gateway.components.shared_services import Program
from gateway.sandbox.backends import Backend, SandboxCommand
from gateway.sandbox.cgroup import Cgroup
from gateway.sandbox.streams import Streams

START_S = 30.0
"""A worker imports before it is ready; on a machine under load that takes a while."""
GRACE_S = 3.0
"""Seconds beyond a program's wall time, for the worker to end it and to answer; also to tidy up."""
MAX_FRAME_BYTES = 64 << 10
STDERR_CHARS = 500
HEADER = struct.Struct(">I")


class SandboxWorkerLost(Exception):
    """The worker failed; what it ran has no result."""


class WorkerHandle:
    """One worker, started when it is first needed and again after every loss."""

    def __init__(self, backend: Backend, group: Cgroup | None = None) -> None:
        self._backend = backend
        self._group = group
        self._command: SandboxCommand | None = None
        self._popen: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._socket: socket.socket
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """Process id of the process that was started; None while there is none."""
        return self._popen.pid if self._popen else None

    async def start(self) -> None:
        """Start the worker if it is not there, and wait until it takes a job.

        Raises:
            SandboxWorkerLost: it ended, or was not ready in time.
            Unavailable: it cannot be started here.
        """
        if self._popen is not None and not self._is_ready:
            await self._await_ready(GRACE_S, restart=True)
        if self._popen is None:
            await self._launch()
            await self._await_ready(START_S, restart=False)

    async def run(self, program: Program, wall_s: float) -> dict[str, Any]:
        """Run one program in a started worker; its outcome frame, and what came out of its streams.

        Raises:
            SandboxWorkerLost: the worker ended, or was late.
        """
        self._is_ready = False
        try:
            async with Streams(program, self._stop) as streams:
                async with asyncio.timeout(wall_s + GRACE_S):
                    with self._bounded(program) as group:
                        self._send(_limits(program, wall_s), [*streams.theirs, *group])
                    streams.listen()
                    frame = await self._read_frame()
                if self._group is not None and self._group.ran_out_of_memory():
                    frame["stopped"] = "memory"
                return await streams.complete(frame)
        except TimeoutError as error:
            self.kill()
            raise SandboxWorkerLost(f"no answer within {wall_s + GRACE_S:g} s") from error
        except (OSError, EOFError, ValueError, RecursionError) as error:
            raise self._lost(error) from error
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End the worker and all that it runs."""
        if self._popen is None:
            return
        self._writer.transport.abort()  # a worker that listens ends by this alone
        for pid in (*_children(self._popen.pid), self._popen.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._popen.wait()
        self._popen = None
        if self._group is not None:
            self._group.remove()
        if self._stderr is not None:
            self._stderr.close()
        if self._command is not None and self._command.scratch is not None:
            _remove(self._command.scratch)

    async def _launch(self) -> None:
        self._command = self._backend.command()
        if self._group is not None:
            self._group.make()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket = ours
        with theirs:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours)
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by kill()
            try:
                self._popen = subprocess.Popen(  # noqa: ASYNC220 - vfork and exec: milliseconds
                    self._command.argv,
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr,
                    env={},
                    cwd="/",
                    start_new_session=True,
                )
            except BaseException:
                self._writer.transport.abort()
                raise

    async def _await_ready(self, timeout_s: float, *, restart: bool) -> None:
        """Wait for the worker's word; one that does not come is a loss, or calls for another one."""
        try:
            async with asyncio.timeout(timeout_s):
                frame = await self._read_frame()
                if frame != {"ready": True}:
                    raise ValueError(f"{str(frame)[:80]} came; ready was wanted")
            self._is_ready = True
        except (
            OSError,
            EOFError,
            ValueError,
            RecursionError,
        ) as error:  # TimeoutError is an OSError
            lost = self._lost(error)
            if not restart:
                raise lost from error
        except BaseException:
            self.kill()
            raise

    def _bounded(self, program: Program) -> AbstractContextManager[Sequence[int]]:
        if self._group is None:
            return contextlib.nullcontext(())
        return self._group.bounded(program.memory_bytes)

    def _send(self, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """To a worker that waits for it, past the transport: that carries no descriptors."""
        data = json.dumps(message).encode()
        socket.send_fds(self._socket, [HEADER.pack(len(data)) + data], fds)

    def _stop(self) -> None:
        with contextlib.suppress(OSError):  # it ended, as its frame will report
            self._send({"stop": True})

    async def _read_frame(self) -> dict[str, Any]:
        (length,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
        if length > MAX_FRAME_BYTES:
            raise ValueError(f"a frame of {length} bytes")
        frame = json.loads(await self._reader.readexactly(length))
        if not isinstance(frame, dict):
            raise ValueError("a frame that is no object")  # noqa: TRY004 - a matter of protocol
        return frame

    def _lost(self, error: Exception) -> SandboxWorkerLost:
        said = ""
        if self._stderr is not None:
            with contextlib.suppress(OSError):
                self._stderr.seek(0)
                said = self._stderr.read().decode(errors="replace").strip()[-STDERR_CHARS:]
        self.kill()
        reason = str(error) or type(error).__name__
        return SandboxWorkerLost(f"{said} ({reason})" if said else reason)


def _limits(program: Program, wall_s: float) -> dict[str, Any]:
    return {"cpu_s": program.cpu_s, "wall_s": wall_s, "memory_bytes": program.memory_bytes}


def _children(pid: int) -> list[int]:
    """bwrap's own child is pid 1 of its namespace; as root, bwrap lacks the right to end it."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children") as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # it ended
        return []


def _remove(folder: str) -> None:
    """Remove what programs left, however deep and whatever its modes; /bin/rm does not recurse."""
    subprocess.run(["/bin/chmod", "-Rf", "u+rwx", folder], check=False)
    subprocess.run(["/bin/rm", "-rf", "--", folder], check=False)
