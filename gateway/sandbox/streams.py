"""Input and output of a program, held at the gateway's end: no worker ever sees them.

Source and input are files in memory that cannot be changed any more; standard output, standard error and
the report are pipes, read up to a limit: at the end, and by the event loop if the program takes longer
(most are done before, and what they write fits into a pipe).
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from gateway.components.shared_services import Program

T = TypeVar("T")

NAMES = ("stdout", "stderr", "report")
CHUNK_BYTES = 1 << 16
LISTEN_AFTER_S = 0.02
AT_ONCE_BYTES = 1 << 18
"""More than this is decoded in a thread."""
SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


class Streams:
    """The streams of one run of a program, from its start to its end: a context."""

    def __init__(self, program: Program, stop: Callable[[], None]) -> None:
        """
        Args:
            stop: called once one of its outputs is over its limit.
        """
        self._program = program
        self._stop = stop
        self._files: list[int] = []
        self._outputs: list[ProgramOutput] = []
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Streams:
        texts = (self._program.source, self._program.stdin, *self._program.calls)
        contents = await _call(_encode, self._program, size=sum(map(len, texts)))
        try:
            for content in contents:
                self._files.append(
                    os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                )
                _fill(self._files[-1], content)
            for _ in NAMES:
                self._outputs.append(ProgramOutput(4 * self._program.max_output_chars))
        except OSError:
            self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    @property
    def theirs(self) -> list[int]:
        """Descriptors for the program: its standard streams, where it reports, and its source."""
        stdin, source = self._files
        return [stdin, *(output.writer for output in self._outputs), source]

    def listen(self) -> None:
        """Have them read, now that the program's descriptors are on their way."""
        self._let_go()
        self._timer = asyncio.get_running_loop().call_later(LISTEN_AFTER_S, self._listen)

    async def complete(self, frame: dict[str, Any]) -> dict[str, Any]:
        """The frame of a program that has ended, with what it wrote; too much counts as stopped."""
        for output in self._outputs:
            output.drain()
        texts = await _call(self._texts, size=sum(output.size for output in self._outputs))
        if frame.get("stopped") is None and any(output.is_over for output in self._outputs):
            frame = {**frame, "stopped": "output"}
        return {**frame, **texts}

    def _listen(self) -> None:
        for output in self._outputs:
            output.listen(self._stop)

    def _texts(self) -> dict[str, str]:
        limit = self._program.max_output_chars
        outputs = zip(NAMES, self._outputs, strict=True)
        return {name: output.text(limit) for name, output in outputs}

    def _close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._let_go()
        for output in self._outputs:
            output.close()

    def _let_go(self) -> None:
        """Close what is the program's."""
        for fd in self._files:
            os.close(fd)
        self._files.clear()
        for output in self._outputs:
            output.let_go()


class ProgramOutput:
    """Output that a program wrote to one pipe, up to a limit."""

    def __init__(self, limit: int) -> None:
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.reader, False)
        self.is_over = False
        self.size = 0
        self._is_listening = False
        self._limit = limit
        self._chunks: list[bytes] = []

    def listen(self, stop: Callable[[], None]) -> None:
        """Read whenever there is something; `stop` is called once it is too much."""
        asyncio.get_running_loop().add_reader(self.reader, self._on_readable, stop)
        self._is_listening = True

    def drain(self) -> None:
        """Take the rest, once there is no writer any more."""
        while not self.is_over and self._read():
            pass

    def text(self, max_chars: int) -> str:
        """Return the output as text; truncated, and then marked as over, past this many characters."""
        text = b"".join(self._chunks).decode("utf-8", "replace")
        self.is_over |= len(text) > max_chars
        return text[:max_chars]

    def let_go(self) -> None:
        """Close the program's end."""
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def close(self) -> None:
        """Read no more."""
        self._stop_listening()
        os.close(self.reader)

    def _on_readable(self, stop: Callable[[], None]) -> None:
        is_open = self._read()
        if self.is_over or not is_open:
            self._stop_listening()
        if self.is_over:
            stop()

    def _stop_listening(self) -> None:
        if self._is_listening:
            asyncio.get_running_loop().remove_reader(self.reader)
            self._is_listening = False

    def _read(self) -> bool:
        """Take a chunk of what is there; false if nothing is."""
        try:
            chunk = os.read(self.reader, CHUNK_BYTES)
        except BlockingIOError:
            return False
        self._chunks.append(chunk)
        self.size += len(chunk)
        self.is_over |= self.size > self._limit
        return bool(chunk)


async def _call(work: Callable[..., T], *args: Any, size: int) -> T:
    """Here, or in a thread if it is much."""
    if size > AT_ONCE_BYTES:
        return await asyncio.to_thread(work, *args)
    return work(*args)


def _encode(program: Program) -> tuple[bytes, bytes]:
    source = {"source": program.source, "calls": program.calls}
    return program.stdin.encode("utf-8", "surrogatepass"), json.dumps(source).encode()


def _fill(fd: int, content: bytes) -> None:
    """Make it the content of a file for good."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
    os.lseek(fd, 0, os.SEEK_SET)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
