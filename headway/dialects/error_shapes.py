"""Errors in the words of the API that a route speaks.

A router with `route_class=route_in(shape)` answers what its routes raise, and bodies that do not
validate, with what `shape` makes of the `ApiFailure`. Everything else (crashes, tokens, body limits) is
answered by `headway.runtime.http_service`, which knows one shape only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from headway.contracts.errors import ErrorBody, ServiceError
from headway.runtime.json_route import JsonRoute
from headway.runtime.logging import note_request

MAX_PROBLEMS = 4
"""Problems of one body that its error names."""
BAD_REQUEST = (413, 422)
"""Statuses of ours that these APIs know as 400."""


@dataclass(frozen=True, slots=True)
class ApiFailure:
    """Failure of a request, before it takes a dialect's shape."""

    status: int
    code: str
    message: str
    param: str | None = None
    """Field of the request that is to blame."""
    retry_after_s: float | None = None
    """Seconds after which the same request may succeed; None: it never will."""


Shape = Callable[[ApiFailure], dict[str, Any]]
"""The JSON body of a failure."""


class ShapedError(BaseModel):
    """A failure in the words of a route's own API."""

    error: dict[str, Any]


FAILURES: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ShapedError | ErrorBody},
    "5XX": {"model": ShapedError | ErrorBody},
}
"""Responses for the OpenAPI page: `APIRouter(responses=FAILURES)`."""


class InvalidField(ServiceError):
    """A request that validates and still cannot be served as it is written."""

    code = "invalid_request"
    http_status = 400

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @classmethod
    def of(cls, error: ValidationError, names: Mapping[str, str] | None = None) -> InvalidField:
        """The error of a record of ours that was built from a request's fields.

        Args:
            error: raised by the record.
            names: field of the record -> field of the request, where they differ.
        """
        return cls(*_describe(error.errors(), names or {}))


def route_in(shape: Shape, admit: Callable[[Request], None] | None = None) -> type[APIRoute]:
    """The `route_class` of a router that answers failures in this shape.

    Args:
        shape: of the failures.
        admit: raises what keeps a request out, before its body is read.
    """

    class ShapedRoute(JsonRoute):
        def admit(self, request: Request) -> None:
            if admit is not None:
                admit(request)

        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def shaped(request: Request) -> Response:
                try:
                    return await handle(request)
                except (ServiceError, RequestValidationError) as error:
                    return _answer(failure_of(error), shape)

            return shaped

    return ShapedRoute


def failure_of(error: ServiceError | RequestValidationError) -> ApiFailure:
    """Return the failure for an error, whichever part of the server found it."""
    if isinstance(error, RequestValidationError):
        problems = [{**one, "loc": one["loc"][1:]} for one in error.errors()]  # without "body"
        message, param = _describe(problems, {})
        return ApiFailure(400, InvalidField.code, message, param)
    return ApiFailure(
        status=400 if error.http_status in BAD_REQUEST else error.http_status,
        code=error.code,
        message=error.message,
        param=error.param if isinstance(error, InvalidField) else None,
        retry_after_s=error.retry_after_s if error.retryable else None,
    )


def _answer(failure: ApiFailure, shape: Shape) -> Response:
    note_request(code=failure.code, reason=failure.message)
    wait = failure.retry_after_s
    headers = None if wait is None else {"Retry-After": str(math.ceil(wait))}
    body = json.dumps(shape(failure))  # ASCII: it may quote half a surrogate pair
    return Response(body, failure.status, headers, "application/json")


def _describe(
    problems: Sequence[Mapping[str, Any]], names: Mapping[str, str]
) -> tuple[str, str | None]:
    """One line for all problems, and the field that the first one blames."""
    lines: list[str] = []
    for problem in problems[:MAX_PROBLEMS]:
        parts = [str(part) for part in problem["loc"]]
        if parts:
            parts[0] = names.get(parts[0], parts[0])
        is_unknown = problem["type"] == "extra_forbidden"
        text = "not a field of this server; leave it out" if is_unknown else problem["msg"]
        lines.append(f"{'.'.join(parts)}: {text}" if parts else text)
    first = problems[0]["loc"]
    is_body = problems[0]["type"] == "json_invalid" or not first
    return "; ".join(lines), None if is_body else names.get(str(first[0]), str(first[0]))
