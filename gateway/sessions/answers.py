"""Answers to one request of a session: whole, or as server-sent events.

A turn is generated whole before any of it is said, so that tool calls and stops are known: a stream
begins when the turn is complete. Until then it sends comments, which keep proxies from closing it; what
fails within the first `WAIT_S` is answered with a status of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.sessions.chat import TurnReply
from headway.contracts.errors import ServiceError
from headway.dialects.error_shapes import ApiFailure, failure_of
from headway.runtime.disconnect import unless_disconnected
from headway.runtime.event_stream import EventStream

WAIT_S = 10.0
COMMENT = ": still generating\n\n"
Work = Coroutine[Any, Any, TurnReply]


async def answer_whole(
    request: Request, work: Work, whole: Callable[[TurnReply], dict[str, Any]]
) -> Response:
    """The reply in one piece; a client that goes away cancels the work."""
    return JSONResponse(whole(await unless_disconnected(request, work)))


async def answer_stream(
    request: Request,
    work: Work,
    events: Callable[[TurnReply], Iterable[str]],
    failed: Callable[[ApiFailure], str],
) -> Response:
    """The reply as events.

    Args:
        events: the reply in the API's events, written by `event`.
        failed: what a stream that has begun says of a failure.
    """
    playing = asyncio.ensure_future(work)
    try:
        await unless_disconnected(request, asyncio.wait((playing,), timeout=WAIT_S))
        if playing.done():
            await playing  # raises what was refused
    except BaseException:
        playing.cancel()
        raise
    return EventStream(_events(playing, events, failed))


async def _events(
    playing: asyncio.Task[TurnReply],
    events: Callable[[TurnReply], Iterable[str]],
    failed: Callable[[ApiFailure], str],
) -> AsyncGenerator[str]:
    try:
        while not playing.done():
            yield COMMENT
            await asyncio.wait((playing,), timeout=WAIT_S)
        for one in events(await playing):
            yield one
    except ServiceError as error:
        yield failed(failure_of(error))
    finally:
        playing.cancel()


def event(body: dict[str, Any], name: str | None = None) -> str:
    """One server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(body, ensure_ascii=False)}\n\n"


def metadata_of(reply: TurnReply) -> dict[str, str]:
    """The turn's number, for its reward, and the newest version that sampled it, as text."""
    versions = [version for version, _, _ in reply.response.version_runs]
    known = {"weight_version": str(max(versions))} if versions else {}
    return {"turn": str(reply.number), **known}
