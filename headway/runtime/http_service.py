"""What every HTTP server of ours has: request ids, body limit, typed errors, readiness, shutdown."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import socket
import uuid
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway import __version__
from headway.contracts.config.gateway import ServiceConfig
from headway.contracts.errors import ConfigError, ErrorBody, ServiceError
from headway.contracts.http import HEALTH, REQUEST_ID_HEADER, HealthResponse

log = logging.getLogger(__name__)

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
KEEP_ALIVE_S = 75
GRACEFUL_SHUTDOWN_S = 5


def create_service(title: str, lifespan: Lifespan, max_body_bytes: int) -> FastAPI:
    """An app with health, error bodies, request ids and a body limit, and no routes of its own."""
    app = FastAPI(title=title, version=__version__, lifespan=lifespan)
    app.add_middleware(RequestBoundary, max_body_bytes=max_body_bytes)
    app.add_exception_handler(ServiceError, _answer_service_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(Exception, _answer_crash)

    @app.get(HEALTH, response_model=HealthResponse)
    async def health() -> HealthResponse:
        return HealthResponse()

    return app


def serve(app: FastAPI, config: ServiceConfig) -> None:
    """Bind, serve until SIGTERM or SIGINT, and announce readiness in `config.ready_file`.

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
            timeout_graceful_shutdown=GRACEFUL_SHUTDOWN_S,
        ),
        url=f"http://{host}:{port}",
        ready_file=Path(config.ready_file) if config.ready_file else None,
    )
    app.state.url = server.url
    server.run(sockets=[listener])


class RequestBoundary:
    """Pure ASGI: gives each request an id and refuses bodies above the limit while they stream."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _clean_id(headers.get(REQUEST_ID_HEADER.encode()))
        scope.setdefault("state", {})["request_id"] = request_id
        seen = 0

        async def limited_receive() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body_bytes:
                raise _BodyTooLarge
            return message

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        length = headers.get(b"content-length", b"0")
        try:
            if length.isdigit() and int(length) > self._max_body_bytes:
                raise _BodyTooLarge
            await self._app(scope, limited_receive, send_with_id)
        except _BodyTooLarge:
            body = ErrorBody(
                code="body_too_large",
                message=f"the body exceeds {self._max_body_bytes} bytes; send fewer rollouts per request",
                retryable=False,
                request_id=request_id,
            )
            await JSONResponse(body.model_dump(), status_code=413)(scope, receive, send_with_id)


class _BodyTooLarge(Exception):
    """Never leaves this module."""


class _AnnouncingServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, url: str, ready_file: Path | None) -> None:
        super().__init__(config)
        self.url = url
        self._ready_file = ready_file

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready_file:
            partial = self._ready_file.with_suffix(".partial")
            partial.write_text(json.dumps({"url": self.url, "pid": os.getpid()}))
            partial.replace(self._ready_file)


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


async def _answer_service_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, ServiceError):
        raise TypeError(f"handler of ServiceError called with {type(error)}")
    headers = {"Retry-After": "1"} if error.retryable else None
    body = error.to_body(request.state.request_id)
    return JSONResponse(body.model_dump(), status_code=error.http_status, headers=headers)


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise TypeError(f"handler of RequestValidationError called with {type(error)}")
    problems = [
        f"{'.'.join(str(part) for part in e['loc'])}: {e['msg']}" for e in error.errors()[:8]
    ]
    body = ErrorBody(
        code="invalid_request",
        message="; ".join(problems),
        retryable=False,
        request_id=request.state.request_id,
    )
    return JSONResponse(body.model_dump(), status_code=422)


async def _answer_crash(request: Request, error: Exception) -> JSONResponse:
    log.error("request crashed", exc_info=error, extra={"path": request.url.path})
    body = ErrorBody(
        code="internal",
        message=f"{type(error).__name__} while serving {request.url.path}; the server's log has more",
        retryable=False,
        request_id=getattr(request.state, "request_id", None),
    )
    return JSONResponse(body.model_dump(), status_code=500)
