"""Waiting for what wakes nobody: a condition of other processes, threads or counters, with a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

LIMIT_S = 30.0
"""Ample on a loaded machine; a test that holds never waits for it."""


def eventually(
    condition: Callable[[], object], timeout_s: float = LIMIT_S, what: str = "the condition holds"
) -> None:
    """Poll until a condition holds, or fail with `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s} s: {what}")
        time.sleep(0.01)


async def until(condition: Callable[[], object], timeout_s: float = LIMIT_S) -> None:
    """Let the event loop turn until a condition holds.

    Raises:
        TimeoutError: it does not.
    """
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - nothing notifies anybody
            await asyncio.sleep(0.001)


@asynccontextmanager
async def assert_loop_turns(times: int) -> AsyncIterator[None]:
    """Fail unless the event loop turns so often meanwhile."""
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0.001)

    turning = asyncio.create_task(turn())
    try:
        yield
    finally:
        turning.cancel()
    assert turns > times
