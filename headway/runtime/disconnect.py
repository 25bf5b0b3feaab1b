"""Work that ends when its caller is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, and cancel it when the client goes away (the server would not).

    Raises:
        ClientDisconnect: it went away; there is no caller to answer.
    """
    limit = asyncio.timeout(None)
    try:
        async with limit:
            watch = asyncio.create_task(_watch(request, limit))
            try:
                return await work
            finally:
                watch.cancel()
    except TimeoutError:
        if limit.expired():
            raise ClientDisconnect from None
        raise


async def _watch(request: Request, limit: asyncio.Timeout) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    limit.reschedule(asyncio.get_running_loop().time())
