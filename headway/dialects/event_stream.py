"""Streamed answers: one JSON object per server-sent event, then `[DONE]`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request

from headway.contracts.errors import ServiceError
from headway.dialects.error_shapes import Shape, failure_of
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.event_stream import EventStream
from headway.runtime.logging import note_request


async def event_stream(
    request: Request, chunks: AsyncGenerator[dict[str, Any]], shape: Shape
) -> EventStream:
    """Stream chunks; a failure in the middle is an event of this shape.

    The first chunk is waited for, so that a request that is refused at once gets a status of its own.
    """
    first = await unless_disconnected(request, anext(chunks))
    return EventStream(_events(first, chunks, shape))


async def _events(
    first: dict[str, Any], rest: AsyncGenerator[dict[str, Any]], shape: Shape
) -> AsyncGenerator[str]:
    async with aclosing(rest):
        try:
            yield _event(first)
            async for chunk in rest:
                yield _event(chunk)
        except ServiceError as error:
            failure = failure_of(error)
            note_request(code=failure.code, reason=failure.message)
            yield _event(shape(failure))
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"  # ASCII: it may quote half a surrogate pair
