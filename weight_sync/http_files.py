"""Files of one URL, fetched over kept connections by threads that never give up half a transfer.

A connection that breaks, an answer that ends early and a server that is busy are asked again, from the
byte where it stopped, until the caller's deadline passes or `close` is called. Redirects are refused: the
URL that was allowed is the one that is read.
"""

from __future__ import annotations

import http.client
import io
import random
import re
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager, suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from headway.contracts.errors import SyncError
from headway.runtime.model_files import MAX_TEXT_BYTES
from headway.runtime.secret import authorization
from headway.runtime.tls import client_context
from weight_sync.deadline import Deadline

_URL = re.compile(r"https?://[A-Za-z0-9._~\[\]:-]+(/[A-Za-z0-9._~-]+)*")
CONNECT_S = 5.0
SILENCE_S = 20.0
"""Seconds without a byte after which a connection counts as broken."""
TICK_S = 0.05
"""Seconds after which a waiting thread checks its deadline again."""
SLICE_BYTES = 8 << 20
"""Bytes received at once; a broken connection loses at most these."""
WAKE_BYTES = 1 << 20
"""Bytes for which a receiving thread sleeps: to be woken costs more than to copy."""
MAX_ERROR_BYTES = 1 << 16
MIN_PAUSE_S, MAX_PAUSE_S = 0.02, 1.0

T = TypeVar("T")
Connection = http.client.HTTPConnection


class _Busy(Exception):
    """The server cannot answer now, or did not to the end."""


class _Absent(Exception):
    """There is no such file."""

    def __init__(self, was_waited_for: bool) -> None:
        self.was_waited_for = was_waited_for


class _PlainResponse(http.client.HTTPResponse):
    """Response that is read in few large steps."""

    def __init__(self, sock: socket.socket, *rest: Any, **more: Any) -> None:
        super().__init__(sock, *rest, **more)
        self._sock = sock

    def readinto(self, target: Any) -> int:
        """Read like the parent, except at the end of a response, which never has `WAKE_BYTES` more."""
        before_end = (self.length or 0) - WAKE_BYTES
        if before_end < io.DEFAULT_BUFFER_SIZE:
            self._sleep_until(1)
            return super().readinto(target)
        self._sleep_until(WAKE_BYTES)
        return super().readinto(memoryview(target)[:before_end])

    def _sleep_until(self, count: int) -> None:
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)


class _PlainConnection(Connection):
    """The kernel keeps the time: a timeout of Python's costs a `poll` and a short read per packet."""

    response_class = _PlainResponse

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(None)
        silence = struct.pack("ll", int(SILENCE_S), 0)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, silence)
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, silence)


class _SecureConnection(http.client.HTTPSConnection):
    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(SILENCE_S)


class HttpFiles:
    """The files below one URL. `text` and `fetch` work in background threads; see `result`."""

    def __init__(
        self, url: str, token: str | None, num_connections: int, deadline: Deadline, retry_s: float
    ) -> None:
        """
        Args:
            retry_s: seconds without progress after which a request that fails is not sent again.
        """
        if not _URL.fullmatch(url) or ".." in url.split("/"):
            raise SyncError(f"{url} is no plain URL; take http://host:port/path")
        self._url = url
        self._parts = urlsplit(url)
        self._headers = authorization(token)
        self._deadline = deadline
        self._retry_s = retry_s
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._pool = ThreadPoolExecutor(num_connections, thread_name_prefix="weights-http")

    def text(self, name: str, wait_s: float = 0.0) -> Future[bytes | None]:
        """A small file; None if it is not there, nor comes within about `wait_s`."""
        return self._pool.submit(self._text, name, wait_s)

    def fetch(self, name: str, offset: int, target: memoryview) -> Future[None]:
        """Fill `target` with bytes of a file."""
        return self._pool.submit(self._fill, name, offset, target)

    def result(self, future: Future[T]) -> T:
        """Wait for a request and return its result.

        Raises:
            SyncError: the request is hopeless, or the deadline has passed.
        """
        while not future.done():
            wait_for([future], timeout=min(TICK_S, self._deadline.remaining_s))
        return future.result()

    def close(self) -> None:
        """End all requests; does not wait for their threads."""
        self._closed.set()
        with self._lock:
            while self._idle:
                self._idle.pop().close()
            for connection in self._busy:
                if connection.sock is not None:
                    with suppress(OSError):
                        connection.sock.shutdown(socket.SHUT_RDWR)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _text(self, name: str, wait_s: float) -> bytes | None:
        retry = _Retry(self._closed, self._retry_s, f"{self._url}/{name}")
        wanted = {"prefer": f"wait={round(wait_s)}"} if wait_s else {}
        while True:
            asked = time.monotonic()
            try:
                with self._answer(name, wanted) as answer:
                    content = answer.read(MAX_TEXT_BYTES + 1)
                    if len(content) > MAX_TEXT_BYTES:
                        raise SyncError(f"{self._url}/{name} is larger than any manifest")
                    if answer.length:
                        raise _Busy(f"the answer ended {answer.length} bytes early")
                    return content
            except _Absent as absent:
                if wait_s and not absent.was_waited_for:
                    self._closed.wait(max(0.0, asked + TICK_S - time.monotonic()))
                return None
            except (OSError, http.client.HTTPException, _Busy) as error:
                retry.pause(error)

    def _fill(self, name: str, offset: int, target: memoryview) -> None:
        retry = _Retry(self._closed, self._retry_s, f"{self._url}/{name}")
        done = 0
        while done < len(target):
            try:
                for count in self._receive(name, offset + done, target[done:]):
                    done += count
                    retry.progress()
                    self._deadline.restart()
                    if self._closed.is_set():
                        raise SyncError(f"the transfer from {self._url} was cancelled")
                if done < len(target):
                    retry.pause(f"the answer ended {len(target) - done} bytes early")
            except _Absent:
                raise SyncError(f"{self._url}/{name} is torn: it is not there") from None
            except (OSError, http.client.HTTPException, _Busy) as error:
                retry.pause(error)

    def _receive(self, name: str, offset: int, target: memoryview) -> Iterator[int]:
        wanted = {"range": f"bytes={offset}-{offset + len(target) - 1}"}
        with self._answer(name, wanted) as answer:
            if answer.status == http.client.PARTIAL_CONTENT:
                self._check_range(name, answer.headers.get("content-range", ""), offset, target)
            else:
                _skip(answer, offset)
            while target:
                count = answer.readinto(target[:SLICE_BYTES])
                if not count:  # None is silence
                    return
                yield count
                target = target[count:]

    def _check_range(self, name: str, given: str, offset: int, target: memoryview) -> None:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", given.strip())
        if match is None or int(match[1]) != offset:
            raise SyncError(f"{self._url}/{name} from {offset} was answered with range {given!r}")
        if int(match[2]) + 1 < offset + len(target) and match[3] == str(int(match[2]) + 1):
            raise SyncError(f"{self._url}/{name} is torn: it ends before {offset + len(target)}")

    @contextmanager
    def _answer(self, name: str, headers: dict[str, str]) -> Iterator[http.client.HTTPResponse]:
        with self._connection() as connection:
            path = f"{self._parts.path}/{name}"
            connection.request("GET", path, headers={**self._headers, **headers})
            with connection.getresponse() as answer:
                if answer.status in (404, 410):
                    answer.read(MAX_ERROR_BYTES)
                    raise _Absent("preference-applied" in answer.headers)
                self._check_status(name, answer.status)
                yield answer
                if not answer.isclosed():  # the rest of the answer would be read as the next one
                    connection.close()

    @contextmanager
    def _connection(self) -> Iterator[Connection]:
        with self._lock:
            if self._closed.is_set():
                raise SyncError(f"the transfer from {self._url} was cancelled")
            connection = self._idle.pop() if self._idle else self._make_connection()
            self._busy.add(connection)
        is_whole = False
        try:
            yield connection
            is_whole = True
        except _Absent:
            is_whole = True
            raise
        finally:
            with self._lock:
                self._busy.discard(connection)
                if is_whole and not self._closed.is_set():
                    self._idle.append(connection)
                else:
                    connection.close()

    def _make_connection(self) -> Connection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "http":
            return _PlainConnection(host, port, timeout=CONNECT_S)
        return _SecureConnection(host, port, timeout=CONNECT_S, context=client_context())

    def _check_status(self, name: str, status: int) -> None:
        if status in (200, 206):
            return
        if status in (408, 425, 429) or status >= 500:
            raise _Busy(f"status {status}")
        url = f"{self._url}/{name}"
        if status in (401, 403):
            raise SyncError(
                f"{url} wants another token (status {status}); set weights.token_env to a variable "
                "that holds the publisher's"
            )
        if status == 416:
            raise SyncError(f"{url} is torn: it ends early")
        raise SyncError(
            f"{url} was answered with status {status}; give the URL that the weights themselves are at"
        )


class _Retry:
    """Pauses that grow between attempts without progress."""

    def __init__(self, closed: threading.Event, limit_s: float, url: str) -> None:
        self._closed = closed
        self._limit_s = limit_s
        self._url = url
        self.progress()

    def progress(self) -> None:
        self._since = time.monotonic()
        self._pause_s = 0.0  # a kept connection may have been closed long ago: once more at once

    def pause(self, reason: object) -> None:
        """Wait before the next attempt.

        Raises:
            SyncError: it was tried for too long, or the transfer was cancelled.
        """
        late = time.monotonic() - self._since > self._limit_s
        if late or self._closed.wait(self._pause_s * random.uniform(0.5, 1.0)):
            raise SyncError(f"{self._url} cannot be fetched: {reason}")
        self._pause_s = min(MAX_PAUSE_S, max(MIN_PAUSE_S, 2 * self._pause_s))


def _skip(answer: http.client.HTTPResponse, count: int) -> None:
    """Read past what was not asked for: the server knows no ranges."""
    scratch = memoryview(bytearray(min(count, SLICE_BYTES)))
    while count:
        skipped = answer.readinto(scratch[:count])
        if skipped == 0:
            return
        count -= skipped
