"""What a connection may ask of a server before any of its requests is served.

uvicorn alone waits for ever: for the rest of a head, for the rest of a body, and after a line that is no
request. Here a request that does not arrive is given up, a head is bounded in bytes and fields, and a
connection above the limit is told so. A request that comes in one piece costs no timer.

Not covered: a TLS handshake that never ends (asyncio ends it after 60 s), and an answer that nobody
reads.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import ClassVar

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.errors import ErrorBody

MAX_HEAD_BYTES = 32 << 10
MAX_FIELDS = 128
BODY_BYTES_PER_S = 64 << 10
"""A body that comes slower than this is given up, once `header_timeout_s` is over."""


def limited_protocol(config: ServiceConfig) -> type[HttpToolsProtocol]:
    """The protocol of a service, for `uvicorn.Config(http=...)`."""
    limits = {
        "patience_s": config.header_timeout_s,
        "max_connections": config.max_connections,
    }
    return type("LimitedProtocol", (_Limited,), limits)


class _HeadTooLarge(Exception):
    """Raised within the parser, which ends there."""


class _Limited(HttpToolsProtocol):
    patience_s: ClassVar[float]
    max_connections: ClassVar[int]

    _timer: asyncio.TimerHandle | None = None
    _since = 0.0
    """When the request began to arrive, or the connection."""
    _num_bytes = 0
    """Of that request, without the piece that began it."""
    _is_head = True
    _is_whole = False
    _head_bytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self.max_connections
        if excess > self.max_connections:  # those that were told so hold on to it
            transport.abort()
        elif excess > 0:
            self.app = _answer_full
        self._since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_whole:
            self._num_bytes += len(data)
        super().data_received(data)
        if self._is_head and self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._is_refused = True
            self.send_400_response("")
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._since = self.loop.time()
        self._num_bytes = self._head_bytes = 0
        self._is_head, self._is_whole = True, False

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value))

    def on_headers_complete(self) -> None:
        self._is_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_whole = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or too large a one, and close."""
        if self._is_refused:
            wish = f"at most {MAX_FIELDS} fields and {MAX_HEAD_BYTES} bytes"
            self._end_with(431, f"the head of the request is too large; send {wish}")
        else:
            self._end_with(400, "this is no HTTP request that could be read")

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_FIELDS:
            self._is_refused = True
            raise _HeadTooLarge

    def _end_with(self, status: int, text: str) -> None:
        body = ErrorBody(code="invalid_request", message=text, retryable=False).model_dump_json()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write((head + body).encode())
        self.transport.close()

    def _watch(self) -> None:
        """Run the timer while the other side is to send; uvicorn's own runs between requests."""
        is_served = self._is_whole and not self.cycle.response_complete
        if is_served or self.timeout_keep_alive_task is not None or self.transport.is_closing():
            self._unwatch()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.patience_s, self._look)

    def _unwatch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Close, or go on waiting for a body that comes."""
        self._timer = None
        now = self.loop.time()
        if self.flow.read_paused:  # it is this server that lets it wait
            self._since = now
        left = self._since + self.patience_s + self._num_bytes / BODY_BYTES_PER_S - now
        if left > 0:
            self._timer = self.loop.call_later(left, self._look)
        else:
            self.transport.close()


async def _answer_full(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    text = "this server has as many connections as it takes (service.max_connections)"
    body = ErrorBody(code="queue_full", message=text, retryable=True)
    headers = {"Retry-After": "1", "connection": "close"}
    await JSONResponse(body.model_dump(), 503, headers)(scope, receive, send)
