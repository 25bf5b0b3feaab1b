"""The watch sees what keeps a loop from going round, and nothing else."""

from __future__ import annotations

import asyncio
import logging
import os
import time

import pytest

from headway.runtime import stalls
from headway.runtime.stalls import LONG_S, TICK_S, StallWatch
from tests.waiting import until


def block(seconds: float) -> None:
    """Keep the loop from going round."""
    time.sleep(seconds)


async def ticks(watch: StallWatch, number: int = 2) -> None:
    """Let the watch look."""
    for _ in range(number):
        timer = watch._timer
        await until(lambda timer=timer: watch._timer is not timer)


async def test_what_blocks_the_loop_is_a_stall(caplog: pytest.LogCaptureFixture):
    with StallWatch() as watch, caplog.at_level(logging.WARNING, stalls.__name__):
        block(0.3)
        await ticks(watch)
    assert watch.longest_s >= 0.3 - TICK_S - 0.005
    assert watch.num_long == 1
    assert [record.stall_s for record in caplog.records] == [round(watch.longest_s, 3)]


async def test_waiting_is_no_stall():
    with StallWatch() as watch:
        await asyncio.sleep(2 * LONG_S)
    assert watch.num_long == 0


async def test_time_without_a_cpu_is_no_stall(monkeypatch: pytest.MonkeyPatch):
    """The system says that the thread waited for a CPU for a quarter of a second."""
    delays = iter([0.0, 0.25])
    monkeypatch.setattr(stalls._RunDelay, "read_s", lambda _: next(delays, 0.25))
    with StallWatch() as watch:
        block(0.3)
        await ticks(watch, 1)
    assert watch.num_long == 0


async def test_a_request_to_an_idle_loop_is_watched_closely():
    with StallWatch() as watch:
        await until(lambda: watch._is_idle)
        watch.wake()
        block(LONG_S + 2 * TICK_S)
        await ticks(watch)
    assert watch.num_long == 1


async def test_a_system_without_the_figure_counts_everything(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object) -> int:
        raise FileNotFoundError

    with monkeypatch.context() as context:
        context.setattr(os, "open", missing)
        watch = StallWatch().__enter__()
    with watch:
        block(0.2)
        await ticks(watch)
    assert watch.num_long == 1
