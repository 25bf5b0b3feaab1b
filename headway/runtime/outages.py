"""Waiting for a user's service that is away.

A service is away while nobody can connect to it, it drops its connections, or it answers 502, 503 or 504.
Calls are made again, with growing pauses and jitter, until the service has been away for `wait_s`. From
then on each call is made once, so that rollouts which need the service do not hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from headway.contracts.errors import ServiceAway
from headway.contracts.http.status import AwayService
from headway.runtime.clock import monotonic
from headway.runtime.fair_pool import clock_stopped

T = TypeVar("T")
log = logging.getLogger(__name__)

PAUSE_S = 0.2
MAX_PAUSE_S = 5.0
LOGGED_S = 1.0
"""Shorter outages are not logged: a busy service that refuses a call now and then is not away."""


class ServiceUnreachable(Exception):
    """A service could not be reached, or was lost during a call."""


@dataclass(slots=True)
class _Outage:
    since: float
    tried_at: float
    is_logged: bool = False


class Outages:
    """Services that are away, by URL, and the calls that wait for them."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._outages: dict[str, _Outage] = {}
        self._waiting: Counter[str] = Counter()

    def away(self) -> list[AwayService]:
        """Services that are away now."""
        self._forget_old()
        now = monotonic()
        return [
            AwayService(url=url, away_s=now - outage.since, waiting=self._waiting[url])
            for url, outage in self._outages.items()
        ]

    def end(self, url: str) -> None:
        """Note that a service answered."""
        outage = self._outages.pop(_shown(url), None)
        if outage is not None and outage.is_logged:
            away_s = round(monotonic() - outage.since, 1)
            log.info("a service is back", extra={"url": _shown(url), "away_s": away_s})

    async def call(self, url: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call; make it again while it raises `ServiceUnreachable`.

        Raises:
            ServiceAway: the service was away for too long.
        """
        try:
            return await call()
        except ServiceUnreachable as error:
            seen = error
        began, url = monotonic(), _shown(url)
        self._waiting[url] += 1
        try:
            for attempt in count():
                await self._pause(url, began, attempt, seen)
                try:
                    return await call()
                except ServiceUnreachable as error:
                    seen = error
        finally:
            self._waiting[url] -= 1
            self._waiting += Counter()  # forget those that nobody waits for
        raise AssertionError("it counts without end")

    async def _pause(self, url: str, began: float, attempt: int, seen: ServiceUnreachable) -> None:
        now = monotonic()
        away_s = now - min(self._note(url, now, seen), began)
        if away_s >= self._wait_s:
            raise ServiceAway(
                f"{url} was away for {away_s:.1f} s, outbound.service_wait_s={self._wait_s:g}; start it, "
                f"or wait longer; latest: {seen}"
            )
        pause_s = min(MAX_PAUSE_S, PAUSE_S * 2 ** min(attempt, 8)) * random.uniform(0.5, 1.0)
        with clock_stopped():
            await asyncio.sleep(min(pause_s, self._wait_s - away_s))

    def _note(self, url: str, now: float, seen: ServiceUnreachable) -> float:
        """Note a call that found nobody; return since when."""
        self._forget_old()
        outage = self._outages.setdefault(url, _Outage(now, now))
        outage.tried_at = now
        if not outage.is_logged and now - outage.since >= min(LOGGED_S, self._wait_s):
            outage.is_logged = True
            log.warning(
                "a service is away; calls wait for it", extra={"url": url, "reason": str(seen)}
            )
        return outage.since

    def _forget_old(self) -> None:
        """Nobody knows about services that nobody has called lately."""
        oldest = monotonic() - self._wait_s - MAX_PAUSE_S
        self._outages = {
            url: outage
            for url, outage in self._outages.items()
            if self._waiting[url] or outage.tried_at > oldest
        }


def _shown(url: str) -> str:
    """Without a query, which may hold a secret."""
    return url.partition("?")[0]
