"""Limits on a connection before any of its requests is served.

uvicorn alone waits for ever: for the rest of a head, for the rest of a body, and after a line that is no
request. Here a request that does not arrive is given up, a head is bounded in bytes and fields, and a
connection above the limit is told so, or takes the place of an idle one of an address that has more. A
client is not read while requests of it wait for an earlier answer, `MAX_PIPELINED` at most, and
is closed if it reads no answers. A request that comes in one piece costs no timer.

Not covered: a TLS handshake that never ends (asyncio ends it after 60 s).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sized
from http import HTTPStatus
from typing import ClassVar

from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.errors import ErrorBody

MAX_HEAD_BYTES = 32 << 10
MAX_FIELDS = 128
MAX_PIPELINED = 64
"""Requests of a connection that wait for the answer to an earlier one."""
BODY_BYTES_PER_S = 64 << 10
"""A body that comes slower than this is given up, once `header_timeout_s` is over."""


def limited_protocol(config: ServiceConfig) -> type[HttpToolsProtocol]:
    """The protocol of a service, for `uvicorn.Config(http=...)`."""
    limits = {
        "timeout_s": config.header_timeout_s,
        "unread_s": config.unread_timeout_s,
        "max_connections": config.max_connections,
        "held": defaultdict(dict),
    }
    return type("LimitedProtocol", (_Limited,), limits)


class _Refused(Exception):
    """Raised within the parser, which ends there."""


class _Flow(FlowControl):
    """Reads on once no request waits for an earlier one's answer."""

    def __init__(self, transport: asyncio.Transport, pipeline: Sized) -> None:
        super().__init__(transport)
        self._pipeline = pipeline

    def resume_reading(self) -> None:
        if not self._pipeline:
            super().resume_reading()


class _Limited(HttpToolsProtocol):
    timeout_s: ClassVar[float]
    unread_s: ClassVar[float]
    max_connections: ClassVar[int]
    held: ClassVar[defaultdict[str, dict[_Limited, None]]]
    """Connections by the client's address, oldest first."""

    _address = ""
    _unread: asyncio.TimerHandle | None = None
    _timer: asyncio.TimerHandle | None = None
    _since = 0.0
    """Time when the request began to arrive, or the connection."""
    _num_bytes = 0
    """Number of bytes of that request, without the piece that began it."""
    _is_head = True
    _is_whole = False
    _head_bytes = 0
    _is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.pipeline)
        self._address = self.client[0] if self.client else ""
        excess = len(self.connections) - self.max_connections
        if excess > self.max_connections:  # a connection above the limit that was answered keeps it
            transport.abort()
        elif excess > 0 and not self._take_place():
            self.app = _answer_full
        self.held[self._address][self] = None
        self._since = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._stop_waiting()
        self._leave()
        super().connection_lost(exc)
        self.pipeline.clear()

    def _take_place(self) -> bool:
        """Close an idle connection of the address that has most, if that is not this one's."""
        most = max(self.held.values(), key=len, default={})
        if len(most) <= len(self.held.get(self._address, ())) + 1:
            return False
        idle = next((each for each in most if each.is_idle), None)
        if idle is None:
            return False
        idle._leave()
        idle.transport.abort()
        return True

    @property
    def is_idle(self) -> bool:
        """True if it awaits no answer."""
        return self.cycle is None or self.cycle.response_complete

    def _leave(self) -> None:
        mine = self.held.get(self._address, {})
        mine.pop(self, None)
        if not mine:
            self.held.pop(self._address, None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader(-1)

    def resume_writing(self) -> None:
        self._stop_waiting()
        super().resume_writing()

    def _await_reader(self, num_bytes: int) -> None:
        """Close once the other side has read nothing for `unread_s`."""
        left = self.transport.get_write_buffer_size()
        if left == num_bytes:
            self.transport.abort()
        else:
            self._unread = self.loop.call_later(self.unread_s, self._await_reader, left)

    def _stop_waiting(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

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
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _Refused
        self._is_head = False
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_whole = True
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no request, or too large a one, and close."""
        if self._owes_answer():  # what were written now would be taken for it
            self.transport.abort()
        elif self._is_refused:
            wish = f"at most {MAX_FIELDS} fields and {MAX_HEAD_BYTES} bytes"
            self._end_with(431, f"the head of the request is too large; send {wish}")
        else:
            self._end_with(400, "this is no HTTP request that could be read")

    def _owes_answer(self) -> bool:
        is_next = self._is_head or self._is_whole
        return bool(self.pipeline) or (
            not self.is_idle and (is_next or self.cycle.response_started)
        )

    def _count(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_FIELDS:
            self._is_refused = True
            raise _Refused

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
            self._timer = self.loop.call_later(self.timeout_s, self._look)

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
        left = self._since + self.timeout_s + self._num_bytes / BODY_BYTES_PER_S - now
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
