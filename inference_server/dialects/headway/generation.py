"""Routes of one server beyond the common contract: streams, aborts, pauses."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from headway.contracts.errors import ServiceError
from headway.contracts.http import paths
from headway.contracts.http.generation import (
    FlushResponse,
    GenerationAbortRequest,
    GenerationPauseRequest,
)
from headway.contracts.types import LLMDelta, LLMRequest
from headway.dialects.served_model import Part, stream_of
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.event_stream import EventStream
from headway.runtime.json_route import JsonRoute
from inference_server.engine import LocalGenerator

router = APIRouter(route_class=JsonRoute)


@router.post(paths.GENERATE_STREAM, response_class=StreamingResponse)
async def stream(body: LLMRequest, request: Request) -> StreamingResponse:
    """Server-sent events: `delta` (`LLMDelta`) per step, then `response` (`LLMResponse`) or `error`.

    What goes wrong before the first of them is answered with a status of its own.
    """
    parts = stream_of(local(request), body)
    first = await unless_disconnected(request, anext(parts))
    return EventStream(_events(first, parts, request.state.request_id))


async def _events(first: Part, rest: AsyncGenerator[Part], request_id: str) -> AsyncGenerator[str]:
    async with aclosing(rest):
        try:
            yield _event(first)
            async for part in rest:
                yield _event(part)
        except ServiceError as error:
            failed = error.to_body(request_id)
            yield f"event: error\ndata: {failed.model_dump_json()}\n\n"


def _event(part: Part) -> str:
    name = "delta" if isinstance(part, LLMDelta) else "response"
    return f"event: {name}\ndata: {part.model_dump_json()}\n\n"


@router.post(paths.GENERATION_ABORT, status_code=204)
async def abort(body: GenerationAbortRequest, request: Request) -> None:
    await local(request).abort(body.rid)


@router.post(paths.GENERATION_PAUSE, status_code=204)
async def pause(body: GenerationPauseRequest, request: Request) -> None:
    await local(request).pause(body.mode)


@router.post(paths.GENERATION_RESUME, status_code=204)
async def resume(request: Request) -> None:
    await local(request).resume()


@router.post(paths.GENERATION_FLUSH)
async def flush(request: Request) -> FlushResponse:
    return FlushResponse(flushed=await local(request).flush())


def local(request: Request) -> LocalGenerator:
    """The generator of this server."""
    generator: LocalGenerator = request.app.state.service.generator
    return generator
