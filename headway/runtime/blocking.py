"""`Connections` for callers that block: kept open, one per thread and service, over `http.client`.

A trainer calls a gateway three times per batch. The standard library's client takes a third of the CPU
that a general one does for such a call (0.24 ms against 0.8 of httpx). Not covered: redirects, cookies,
proxies, and answers that only the end of their connection ends.
"""

from __future__ import annotations

import select
import ssl
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection, IncompleteRead
from urllib.parse import urlsplit

from headway.runtime.connections import Answer, BrokenOff, NoAnswer, NotConnected


@dataclass(frozen=True, slots=True)
class Patience:
    """How long one request is waited for."""

    connect_s: float
    """Until a connection is made."""
    silent_s: float
    """Until the service says the next word."""


class BlockingConnections:
    """Used by any number of threads."""

    def __init__(
        self, context: ssl.SSLContext, headers: Mapping[str, str], keep_alive_s: float
    ) -> None:
        """Args:
        context: for `https` URLs.
        headers: of every request.
        keep_alive_s: unused for longer, a connection is not used again; shorter than servers wait.
        """
        self._context = context
        self._headers = {"content-type": "application/json", **headers}
        self._keep_alive_s = keep_alive_s
        self._kept = threading.local()
        self._lock = threading.Lock()
        self._open: set[HTTPConnection] = set()

    def ask(self, method: str, url: str, body: bytes | None, patience: Patience) -> Answer:
        """Send a request, with a JSON body or none, and wait for its answer.

        Raises:
            NotConnected: nothing was sent.
            BrokenOff, NoAnswer, OSError: it may have been heard.
        """
        parts = urlsplit(url)
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        service = f"{parts.scheme}://{parts.netloc}"
        connection = self._take(service) or self._connect(service, patience.connect_s)
        try:
            connection.sock.settimeout(patience.silent_s)
            connection.request(method, target, body, self._headers)
            answer = connection.getresponse()
            if answer.length is None and not answer.chunked:
                raise IncompleteRead(b"")  # of a head, or only its end would tell that it is whole
            content = answer.read()
        except BaseException as error:
            self._close(connection)
            raise _told(error, patience.silent_s) from error
        self._keep(service, connection)
        headers = {name.lower().encode(): value.encode() for name, value in answer.getheaders()}
        return Answer(answer.status, headers, content)

    def close(self) -> None:
        """Close every connection; requests of other threads fail."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            self._close(connection)

    def _take(self, service: str) -> HTTPConnection | None:
        """The connection of this thread, if it may be used again."""
        kept: dict[str, tuple[HTTPConnection, float]] = self._kept.__dict__
        if service not in kept:
            return None
        connection, used_at = kept.pop(service)
        is_old = time.monotonic() - used_at > self._keep_alive_s
        if connection.sock is None or is_old or _is_readable(connection.sock):
            self._close(connection)
            return None
        return connection

    def _keep(self, service: str, connection: HTTPConnection) -> None:
        if connection.sock is None:  # the service closed it behind its answer
            self._close(connection)
        else:
            self._kept.__dict__[service] = (connection, time.monotonic())

    def _connect(self, service: str, timeout_s: float) -> HTTPConnection:
        try:
            connection = self._opened(urlsplit(service).scheme, urlsplit(service).netloc, timeout_s)
            connection.connect()
        except (OSError, HTTPException, ValueError) as error:
            raise NotConnected(f"{type(error).__name__}: {error}") from error
        with self._lock:
            self._open.add(connection)
        return connection

    def _opened(self, scheme: str, address: str, timeout_s: float) -> HTTPConnection:
        if scheme == "https":
            return HTTPSConnection(address, timeout=timeout_s, context=self._context)
        if scheme == "http" and address:
            return HTTPConnection(address, timeout=timeout_s)
        raise ValueError(f"{scheme}://{address} is no URL of a service; http://HOST:PORT is wanted")

    def _close(self, connection: HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)


def _is_readable(sock: ssl.SSLSocket | object) -> bool:
    """What can be read while nothing was asked is the end of a connection, or nobody's answer."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)  # type: ignore[arg-type]
    return bool(poll.poll(0))


def _told(error: BaseException, silent_s: float) -> BaseException:
    """The error as `Connections` would raise it."""
    if isinstance(error, TimeoutError):
        return TimeoutError(f"no answer within {silent_s:g} s")
    if isinstance(error, ConnectionError | IncompleteRead):
        return BrokenOff(f"the connection ended before the answer did ({error})")
    if isinstance(error, HTTPException):
        return NoAnswer(f"what came back is not HTTP: {error!r}")
    return error
