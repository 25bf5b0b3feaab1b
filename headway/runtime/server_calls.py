"""Calls from one of our services to another, over aiohttp: the data plane."""

from __future__ import annotations

import aiohttp
from pydantic import ValidationError

from headway.contracts import http
from headway.contracts.errors import BackendError, ErrorBody, ServiceError
from headway.contracts.types import LLMRequest, LLMResponse


async def post_generate(session: aiohttp.ClientSession, url: str, req: LLMRequest) -> LLMResponse:
    """One generation on one server.

    Raises:
        BackendError: the server did not answer, or answered with something else than a response.
        ServiceError: whatever the server raised.
    """
    body = req.model_dump_json().encode()
    target = url + http.GENERATE
    try:
        async with session.post(
            target, data=body, headers={"content-type": "application/json"}
        ) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise error_of(answer.status, content, target, answer.headers.get("Retry-After"))
            return LLMResponse.model_validate_json(content)
    except ValidationError as error:
        raise BackendError(f"{target} answered with no generation: {error}") from error
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BackendError(f"{target} failed: {type(error).__name__}: {error}") from error


def error_of(
    status: int, content: bytes, target: str, retry_after: str | None = None
) -> ServiceError:
    """The error a server meant, as the class it raised there."""
    try:
        error = ServiceError.from_body(ErrorBody.model_validate_json(content))
    except ValidationError:
        kind = BackendError if status in (502, 503, 504) else ServiceError
        error = kind(f"{target} answered {status}: {content[:200]!r}")
    if retry_after is not None and retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error
