"""`Connections` for callers that block: kept open, one per thread and service, over `http.client`.

A trainer calls a gateway three times per batch. The standard library's client takes a third of the CPU
that a general one does for such a call (0.24 ms against 0.8 of httpx). Not covered: redirects, cookies,
proxies, and answers that only the end of their connection ends.
"""

from __future__ import annotations

import select
import socket
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
        try:
            parts = urlsplit(url)
        except ValueError as error:
            raise NotConnected(f"this is no URL: {error}") from error
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        service = f"{parts.scheme}://{parts.netloc}"
        connection = self._take(service) or self._connect(service, patience.connect_s)
        is_whole = False
        try:
            connection.sock.settimeout(patience.silent_s)
            connection.request(method, target, body, self._headers)
            answer = connection.getresponse()
            if answer.length is None and not answer.chunked:
                raise IncompleteRead(b"")  # of a head, or only its end would tell that it is whole
            content = answer.read()
            is_whole = True
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {patience.silent_s:g} s") from error
        except (ConnectionError, IncompleteRead) as error:
            why = f"the connection ended before the answer did ({error})"
            raise BrokenOff(why) from error
        except HTTPException as error:
            raise NoAnswer(f"what came back is not HTTP: {error!r}") from error
        finally:
            if not is_whole:
                self._close(connection)
        self._keep(service, connection)
        headers = {
            name.lower().encode("latin-1"): value.encode("latin-1")
            for name, value in answer.getheaders()
        }
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
            connection = self._made(service, timeout_s)
        except (HTTPException, ValueError) as error:
            raise NotConnected(f"{service} is no URL of a service: {error}") from error
        with self._lock:
            self._open.add(connection)
        try:
            connection.connect()
        except (OSError, HTTPException, ValueError) as error:
            self._close(connection)
            raise NotConnected(f"{type(error).__name__}: {error}") from error
        return connection

    def _made(self, service: str, timeout_s: float) -> HTTPConnection:
        parts = urlsplit(service)
        if parts.scheme == "https" and parts.netloc:
            return HTTPSConnection(parts.netloc, timeout=timeout_s, context=self._context)
        if parts.scheme == "http" and parts.netloc:
            return HTTPConnection(parts.netloc, timeout=timeout_s)
        raise ValueError("http://HOST:PORT is wanted")

    def _close(self, connection: HTTPConnection) -> None:
        connection.close()
        with self._lock:
            self._open.discard(connection)


def _is_readable(sock: socket.socket) -> bool:
    """What can be read while nothing was asked is the end of a connection, or nobody's answer."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
