"""Calls from one of our services to another, over aiohttp: the data plane."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from pydantic import BaseModel, ValidationError

from headway.contracts.errors import BackendError, ErrorBody, NotFound, ServiceError
from headway.contracts.http import paths
from headway.contracts.types import LLMRequest, LLMResponse

_KINDS: Mapping[int, type[ServiceError]] = {
    404: NotFound,
    405: NotFound,
    502: BackendError,
    503: BackendError,
    504: BackendError,
}
"""For answers without an `ErrorBody`: not of ours, or a path that this process does not serve."""


async def post_generate(session: aiohttp.ClientSession, url: str, req: LLMRequest) -> LLMResponse:
    """One generation on one server.

    Raises:
        BackendError: the server did not answer, or answered with something else than a response.
        ServiceError: whatever the server raised.
    """
    body = req.model_dump_json().encode()
    target = url + paths.GENERATE
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


async def post_order(
    session: aiohttp.ClientSession, target: str, body: BaseModel, timeout_s: float
) -> bytes:
    """The answer to one order, as it came.

    Raises:
        BackendError: no answer within `timeout_s`, or none at all.
        ServiceError: whatever the server raised.
    """
    try:
        async with session.post(
            target,
            data=body.model_dump_json().encode(),
            headers={"content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        ) as answer:
            content = await answer.read()
            if answer.status >= 400:
                raise error_of(answer.status, content, target)
            return content
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise BackendError(f"{target} failed: {type(error).__name__}: {error}") from error


def error_of(
    status: int, content: bytes, target: str, retry_after: str | None = None
) -> ServiceError:
    """The error a server meant, as the class it raised there."""
    try:
        error = ServiceError.from_body(ErrorBody.model_validate_json(content))
    except ValidationError:
        error = _KINDS.get(status, ServiceError)(f"{target} answered {status}: {content[:200]!r}")
    if retry_after is not None and retry_after.isdigit():
        error.retry_after_s = float(retry_after)
    return error
