"""Tasks on an event loop: end them, run them to their end, wake who waits for a change."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class Signal:
    """Wakes everyone who took `event()` before the last `notify()`."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.count = 0
        """Notifications so far."""

    def event(self) -> asyncio.Event:
        """Take this before looking at the state, wait on it after."""
        return self._event

    def notify(self) -> None:
        """The state changed."""
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()


async def cancel_and_wait(tasks: Iterable[asyncio.Future[Any] | None]) -> None:
    """Cancel tasks and wait until they have ended, however they do; None is a task that never began."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    if begun:
        await asyncio.gather(*begun, return_exceptions=True)


async def run_to_end(work: Awaitable[T]) -> T:
    """Await work to its end, also when cancelled: the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


async def run_uncancelled(work: Awaitable[T]) -> T:
    """Await work that cannot be undone: a cancellation comes too late, and is dropped."""
    task = asyncio.ensure_future(work)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None:
                this.uncancel()
    return task.result()


async def all_or_none(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all, in order; what one of them raises cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except ExceptionGroup as errors:  # the others were cancelled
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
