"""Blocking work on a thread of its own that need not be waited for.

`asyncio.to_thread` keeps its threads until they end, also at the exit of the process. A thread that
waits for another machine must not have that power: ours is a daemon, and the caller's deadline holds
whatever it does. What it brings too late goes to `discard`.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from headway.contracts.errors import SyncError

T = TypeVar("T")


async def call_on_daemon(
    work: Callable[[], T], timeout_s: float, what: str, discard: Callable[[T], None] | None = None
) -> T:
    """Run `work`, and wait for it this long.

    Raises:
        SyncError: it took longer; `what` says what it was.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - the caller handles it
            _post(loop, partial(fail, error))
        else:
            _post(loop, partial(settle, result))

    def fail(error: Exception) -> None:
        if not answer.done():
            answer.set_exception(error)

    def settle(result: T) -> None:
        if not answer.done():
            answer.set_result(result)
        elif discard is not None:
            threading.Thread(target=discard, args=(result,), daemon=True).start()

    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise SyncError(f"{what} took longer than {timeout_s:g} s") from None


def _post(loop: asyncio.AbstractEventLoop, settle: Callable[[], object]) -> None:
    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return  # the loop was closed
