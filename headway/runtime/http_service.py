"""What every HTTP server of ours has: ids, a token, limits, typed errors, readiness, shutdown."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import os
import re
import socket
import uuid
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway import __version__
from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.errors import ConfigError, ErrorBody, ServiceError, Unauthorized
from headway.contracts.http import HEALTH, OPEN_PATHS, REQUEST_ID_HEADER, HealthResponse
from headway.runtime.logging import note_request, open_request
from headway.runtime.secret import SCHEME, is_authorized

log = logging.getLogger(__name__)

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
Drain = Callable[[], Coroutine[Any, Any, None]]
KEEP_ALIVE_S = 75
FLUSH_S = 1
"""For answers on their way out, after a drain."""
TICK_S = 0.05
CLIENT_GONE = 499
"""For the log; nobody reads the answer."""


def create_service(
    title: str, lifespan: Lifespan, max_body_bytes: int, token: str | None = None
) -> FastAPI:
    """An app with health, error bodies, request ids and a body limit, and no routes of its own.

    With a `token`, every request but those to `OPEN_PATHS` must carry it.
    """
    app = FastAPI(title=title, version=__version__, lifespan=lifespan)
    app.add_middleware(RequestBoundary, max_body_bytes=max_body_bytes, token=token)
    app.add_exception_handler(_BodyTooLarge, _answer_body_too_large)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(ServiceError, _answer_service_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(Exception, _answer_crash)

    @app.get(HEALTH, response_model=HealthResponse)
    async def health() -> HealthResponse:
        return HealthResponse()

    return app


def serve(app: FastAPI, config: ServiceConfig, drain: Drain | None = None) -> None:
    """Bind, serve until SIGTERM or SIGINT, and announce readiness in `config.ready_file`.

    A first signal calls `drain`, while requests are still served; a second one ends it at once.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    listener = _bind(config)
    host, port = listener.getsockname()[:2]
    server = _AnnouncingServer(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(
                config.drain_timeout_s if drain is None else FLUSH_S
            ),
        ),
        url=f"http://{host}:{port}",
        ready_file=Path(config.ready_file) if config.ready_file else None,
        drain=drain,
    )
    app.state.url = server.url
    server.run(sockets=[listener])


class RequestBoundary:
    """Pure ASGI: the manners of every request.

    It gets an id; without the token it is refused; so is a body above the limit, while it streams;
    and if it fails, in whatever way, one line says so, with what `note_request` gathered.
    """

    def __init__(self, app: ASGIApp, max_body_bytes: int, token: str | None) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _clean_id(headers.get(REQUEST_ID_HEADER.encode()))
        scope.setdefault("state", {})["request_id"] = request_id
        known = open_request(request_id)
        status = 0
        seen = 0

        async def limited_receive() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise _BodyTooLarge(self._max_body_bytes)
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        app = self._refusal(scope["path"], headers) or self._app
        await app(scope, limited_receive, send_with_id)
        if status >= 400 or "code" in known:
            log.warning(
                "request failed",
                extra={"method": scope["method"], "path": scope["path"], "status": status, **known},
            )

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> ASGIApp | None:
        """The answer to a request that is refused unread."""
        if self._token is not None and path not in OPEN_PATHS:
            given = headers.get(b"authorization", b"")
            if not is_authorized(given, self._token):
                seen = "a wrong token" if given else "no token"
                error = Unauthorized(
                    f"the request carries {seen}; send `{SCHEME} TOKEN` in its authorization header"
                )
                return _json(error.to_body(), 401, {"WWW-Authenticate": SCHEME})
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            return _BodyTooLarge(self._max_body_bytes).answer()
        return None


class _BodyTooLarge(HTTPException):
    """Raised within `receive`, where FastAPI lets nothing through but an `HTTPException`."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(
            413, f"the body exceeds {max_body_bytes} bytes; send fewer rollouts per request"
        )

    def answer(self) -> JSONResponse:
        body = ErrorBody(code="body_too_large", message=self.detail, retryable=False)
        return _json(body, self.status_code)


class _AnnouncingServer(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, url: str, ready_file: Path | None, drain: Drain | None
    ) -> None:
        super().__init__(config)
        self.url = url
        self._ready_file = ready_file
        self._drain = drain

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready_file:
            partial = self._ready_file.with_suffix(".partial")
            partial.write_text(json.dumps({"url": self.url, "pid": os.getpid()}))
            partial.replace(self._ready_file)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain is not None:
            draining = asyncio.create_task(self._drain(), name="drain")
            while not (draining.done() or self.force_exit):
                await asyncio.wait((draining,), timeout=TICK_S)
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit  # the second signal, of whatever kind
        super().handle_exit(sig, frame)


def _bind(config: ServiceConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is in use; stop the other process or set "
                "service.port (0 takes a free one)"
            ) from error
        raise ConfigError(f"cannot bind {config.host}:{config.port}: {error.strerror}") from error
    return listener


def _clean_id(given: bytes | None) -> str:
    text = (given or b"").decode("latin-1")
    return text if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", text) else uuid.uuid4().hex


def _json(body: ErrorBody, status: int, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """An error's answer, and a note of it for the log."""
    known = note_request(code=body.code, reason=body.message)
    body.request_id = known.get("request_id")
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


async def _answer_service_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, ServiceError):
        raise TypeError(f"handler of ServiceError called with {type(error)}")
    wait = {"Retry-After": str(math.ceil(error.retry_after_s))} if error.retryable else None
    return _json(error.to_body(), error.http_status, wait)


async def _answer_body_too_large(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, _BodyTooLarge):
        raise TypeError(f"handler of _BodyTooLarge called with {type(error)}")
    return error.answer()


async def _answer_nobody(request: Request, error: Exception) -> Response:
    note_request(code="client_gone", reason="the client closed the connection")
    return Response(status_code=CLIENT_GONE)


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise TypeError(f"handler of RequestValidationError called with {type(error)}")
    problems = [
        f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()[:8]
    ]
    return _json(
        ErrorBody(code="invalid_request", message="; ".join(problems), retryable=False), 422
    )


async def _answer_crash(request: Request, error: Exception) -> JSONResponse:
    path = request.url.path
    body = ErrorBody(
        code="internal",
        message=f"{type(error).__name__} while serving {path}; the server's log has more",
        retryable=False,
    )
    answer = _json(body, 500)
    log.error(
        "request crashed", exc_info=error, extra={"path": path, "request_id": body.request_id}
    )
    return answer
