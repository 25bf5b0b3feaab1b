"""Blocking work that has a deadline."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headway.contracts.errors import DataError, SyncError
from inference_server.dialects.sglang.daemon_call import call_on_daemon

DEADLINE_S = 10.0


async def test_it_brings_what_the_work_brings() -> None:
    assert await call_on_daemon(lambda: 3, DEADLINE_S, "counting") == 3


async def test_it_raises_what_the_work_raises() -> None:
    def fail() -> None:
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        await call_on_daemon(fail, DEADLINE_S, "failing")


async def test_what_comes_too_late_is_discarded() -> None:
    may_go, discarded = threading.Event(), threading.Event()

    def work() -> int:
        assert may_go.wait(DEADLINE_S)
        return 7

    with pytest.raises(SyncError, match="waiting took longer than"):
        await call_on_daemon(work, 0.05, "waiting", discard=lambda _: discarded.set())
    may_go.set()
    assert await asyncio.to_thread(discarded.wait, DEADLINE_S)


async def test_what_fails_too_late_is_nobodys() -> None:
    may_go, over = threading.Event(), threading.Event()

    def work() -> None:
        assert may_go.wait(DEADLINE_S)
        over.set()
        raise DataError("late")

    with pytest.raises(SyncError):
        await call_on_daemon(work, 0.05, "waiting")
    may_go.set()
    assert await asyncio.to_thread(over.wait, DEADLINE_S)
