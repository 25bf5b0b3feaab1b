"""Common parts of our HTTP services: ids, tokens with roles, body limits, typed errors."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException as PlainHTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headway import __version__
from headway.contracts.errors import ErrorBody, ServiceError, Unauthorized
from headway.contracts.http.paths import HEALTH, OPEN_PATHS, REQUEST_ID_HEADER, SESSION_PATHS
from headway.contracts.http.status import HealthResponse
from headway.runtime.access import ANYONE, TOKEN, Access, AccessDecision, note_audit
from headway.runtime.allowed_hosts import AllowedHosts, Refusal, repeated
from headway.runtime.exact_routes import ExactRoutes
from headway.runtime.json_route import JsonRoute
from headway.runtime.logging import note_request, open_request
from headway.runtime.problems import Place, Problem, by_weight, explain_unknown, explain_values
from headway.runtime.secret import SCHEME

log = logging.getLogger(__name__)

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
CLOSED = "the handler is closed"
"""Text in uvloop's error for an answer to a connection that broke in this turn of the loop. uvicorn
learns of it in the next one."""
CLIENT_GONE = 499
"""Status for the log; there is no reader of the answer."""
MAX_SHOWN = 256
"""Characters of a path in the log."""
MAX_PROBLEMS = 8
"""Number of a request's problems that are reported."""
FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody},
    "5XX": {"model": ErrorBody},
}
"""Error responses of any route, for the OpenAPI page."""


def create_service(
    title: str,
    lifespan: Lifespan,
    max_body_bytes: int,
    access: Access | None = None,
    hosts: AllowedHosts | None = None,
) -> FastAPI:
    """An app with health, error bodies, request ids and a body limit, and no routes of its own.

    Args:
        access: who may call what; None asks for no token.
        hosts: what it is called by; None knows the names that every service has.
    """
    app = FastAPI(
        title=title,
        version=__version__,
        lifespan=lifespan,
        responses={**FAILURES},
        telemetry={"tracing": False, "metrics": False, "logs": False},  # ours is `/metrics`
    )
    app.router.route_class = JsonRoute
    app.router.routes.insert(0, ExactRoutes(app.router.routes))
    app.state.hosts = hosts or AllowedHosts()
    app.add_middleware(
        RequestBoundary,
        max_body_bytes=max_body_bytes,
        access=access or Access.of(None),
        hosts=app.state.hosts,
    )
    app.add_exception_handler(_BodyTooLarge, _answer_body_too_large)
    app.add_exception_handler(PlainHTTPException, _answer_plain)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(ServiceError, _answer_service_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(Exception, _answer_crash)

    @app.get(HEALTH, response_model=HealthResponse)
    async def health() -> HealthResponse:
        return HealthResponse()

    return app


class RequestBoundary:
    """Pure ASGI: the limits of every request.

    It gets an id; without a token for its route it is refused, and so is one by another name or from a
    page of another origin; so is a body above the limit, while it streams; if it fails, in whatever
    way, one line says so, with what `note_request` gathered; and what it changes is audited.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, access: Access, hosts: AllowedHosts
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._access = access
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (stalls := getattr(scope["app"].state, "stalls", None)) is not None:
            stalls.wake()
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
            try:
                await send(message)
            except RuntimeError as error:
                if CLOSED not in str(error):
                    raise

        method, path = scope["method"], scope["path"]
        admission = self._access.admit(method, path, headers.get(b"authorization", b""))
        before = TOKEN.set(admission.token)
        app = self._app
        if admission.refusal is not None:
            app = _refuse(admission.refusal)
        elif (refusal := self._misaddressed(scope, headers, admission)) is not None:
            body = ErrorBody(code=refusal.code, message=refusal.message, retryable=False)
            app = _json(body, refusal.status)
        elif _is_too_long(headers, self._max_body_bytes):
            app = _BodyTooLarge(self._max_body_bytes).answer()
        try:
            await app(scope, limited_receive, send_with_id)
        finally:
            TOKEN.reset(before)
            if admission.is_audited:
                client = scope.get("client") or ("",)
                note_audit(admission, request_id, client[0], status or 500)
        if status >= 400 or "code" in known:
            shown = {"method": method, "path": path[:MAX_SHOWN], "status": status}
            log.warning("request failed", extra={**shown, **known})

    def _misaddressed(
        self, scope: Scope, headers: Mapping[bytes, bytes], admission: AccessDecision
    ) -> Refusal | None:
        fields: list[tuple[bytes, bytes]] = scope["headers"]
        if len(headers) < len(fields) and (error := repeated(fields)) is not None:
            return error
        path = scope["path"]
        has_secret = admission.caller != ANYONE or path.startswith(SESSION_PATHS)
        return self._hosts.refusal(scope["method"], headers, has_secret, path in OPEN_PATHS)


def _refuse(error: ServiceError) -> ASGIApp:
    """The answer to a request that is refused unread."""
    headers = {"WWW-Authenticate": SCHEME} if isinstance(error, Unauthorized) else None
    return _json(error.to_body(), error.http_status, headers)


def _is_too_long(headers: Mapping[bytes, bytes], max_body_bytes: int) -> bool:
    length = headers.get(b"content-length", b"0")
    return length.isdigit() and int(length) > max_body_bytes


class _BodyTooLarge(HTTPException):
    """Raised within `receive`, where FastAPI lets nothing through but an `HTTPException`."""

    def __init__(self, max_body_bytes: int) -> None:
        super().__init__(
            413, f"the body exceeds {max_body_bytes} bytes; send fewer rollouts per request"
        )

    def answer(self) -> JSONResponse:
        body = ErrorBody(code="body_too_large", message=self.detail, retryable=False)
        return _json(body, self.status_code)


def _clean_id(given: bytes | None) -> str:
    text = (given or b"").decode("latin-1")
    return text if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", text) else os.urandom(16).hex()


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


async def _answer_plain(request: Request, error: Exception) -> JSONResponse:
    """Answer what FastAPI itself refuses: no such path, no such method, a body that is no text."""
    if not isinstance(error, PlainHTTPException):
        raise TypeError(f"handler of HTTPException called with {type(error)}")
    if error.status_code in (404, 405):
        here = f"{request.method} {request.url.path[:MAX_SHOWN]}"
        body = ErrorBody(code="not_found", message=f"{here} is not served here", retryable=False)
    else:
        body = ErrorBody(code="invalid_request", message=str(error.detail), retryable=False)
    return _json(body, error.status_code, error.headers)


async def _answer_nobody(request: Request, error: Exception) -> Response:
    note_request(code="client_gone", reason="the client closed the connection")
    return Response(status_code=CLIENT_GONE)


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise TypeError(f"handler of RequestValidationError called with {type(error)}")
    route = request.scope.get("route")
    model = route.body_model() if isinstance(route, JsonRoute) else None
    problems = by_weight(error.errors())[:MAX_PROBLEMS]
    message = "; ".join(_explain(model or BaseModel, problem) for problem in problems)
    return _json(ErrorBody(code="invalid_request", message=message, retryable=False), 422)


def _explain(model: type[BaseModel], problem: Problem) -> str:
    """Return a line about a field; one of the body is named as it stands there."""
    place, *field = problem["loc"]
    if problem["type"] == "json_invalid":
        return f"body: {problem['ctx']['error']}"
    location = field if place == "body" else problem["loc"]
    if problem["type"] == "extra_forbidden":
        return explain_unknown(model, location)
    if problem["type"] == "missing":
        return f"{Place(model, location).path or place}: required"
    (line,) = explain_values(model, [{**problem, "loc": location}], whole="body")
    return line


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
