"""Calls wait for a service that is away, and only for so long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from headway.contracts.errors import ServiceAway
from headway.runtime import outages
from headway.runtime.fair_pool import time_limit
from headway.runtime.outages import Outages, ServiceUnreachable
from tests.waiting import until

URL = "http://agent/play"


class Service:
    """Away until it is told to be there."""

    def __init__(self, outages: Outages) -> None:
        self.is_there = False
        self.calls = 0
        self._outages = outages

    async def call(self) -> str:
        self.calls += 1
        if not self.is_there:
            raise ServiceUnreachable("connection refused")
        self._outages.end(URL)
        return "played"


@pytest.fixture(autouse=True)
def brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outages, "PAUSE_S", 0.01)
    monkeypatch.setattr(outages, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(outages, "LOGGED_S", 0.02)


async def test_calls_wait_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    away = Outages(10.0)
    service = Service(away)
    calls = [asyncio.create_task(away.call(f"{URL}?key=1", service.call)) for _ in range(3)]
    await until(lambda: service.calls > 12 and caplog.records, 10)
    (seen,) = away.away()
    assert (seen.url, seen.waiting) == (URL, 3)
    assert 0 < seen.away_s < 10
    service.is_there = True
    assert await asyncio.gather(*calls) == ["played"] * 3
    assert away.away() == []
    assert [record.message for record in caplog.records] == [
        "a service is away; calls wait for it",
        "a service is back",
    ]
    assert {record.url for record in caplog.records} == {URL}


async def test_a_short_refusal_is_not_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    away = Outages(10.0)
    service = Service(away)
    call = asyncio.create_task(away.call(URL, service.call))
    await until(lambda: service.calls, 10)
    service.is_there = True
    assert await call == "played"
    assert caplog.records == []


async def test_once_the_time_is_over_calls_fail_at_once():
    away = Outages(0.1)
    service = Service(away)
    message = (
        r"http://agent/play was away for 0\.1 s, outbound\.service_wait_s=0\.1; start it, or wait "
        r"longer; latest: connection refused"
    )
    with pytest.raises(ServiceAway, match=message):
        await away.call(URL, service.call)
    before = service.calls
    with pytest.raises(ServiceAway):
        await away.call(URL, service.call)
    assert service.calls == before + 1
    service.is_there = True
    assert await away.call(URL, service.call) == "played"
    service.is_there = False
    before = service.calls
    with pytest.raises(ServiceAway):
        await away.call(URL, service.call)
    assert service.calls > before + 1


async def waits(away: Outages, call: Callable[[], Awaitable[str]]) -> str:
    async with time_limit(0.03):
        return await away.call(URL, call)


async def test_the_wait_does_not_count_against_a_rewards_time():
    away = Outages(10.0)
    service = Service(away)
    call = asyncio.create_task(waits(away, service.call))
    await until(lambda: service.calls > 8, 10)
    service.is_there = True
    assert await call == "played"


async def test_a_call_that_is_cancelled_waits_no_more():
    away = Outages(10.0)
    call = asyncio.create_task(away.call(URL, Service(away).call))
    await until(lambda: away.away(), 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [service.waiting for service in away.away()] == [0]
