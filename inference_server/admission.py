"""Admission of requests: how many a server takes, how long they may last, and how it stops taking them.

Every dialect of a server generates through one `RequestAdmission`, so these limits hold for all of them.
A request ends in its time scope: at its own timeout, or at once when `end_all` moves it to now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headway.contracts.errors import Conflict, Draining, QueueFull, RequestTimeout


class RequestAdmission:
    """The requests in flight; `until_idle` returns when the last one has ended."""

    def __init__(self, max_in_flight: int | None = None, timeout_s: float | None = None) -> None:
        self._max_in_flight = max_in_flight
        self._timeout_s = timeout_s
        self._scopes: dict[str, asyncio.Timeout] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._is_ending = False
        self.draining = asyncio.Event()
        """Set once nothing new is taken."""

    @property
    def in_flight(self) -> int:
        """Requests running or waiting."""
        return len(self._scopes)

    @asynccontextmanager
    async def admit(self, rid: str) -> AsyncIterator[None]:
        """Admit one request while the block runs.

        Raises:
            Draining: the server is shutting down, or had to end this request.
            QueueFull: the most requests allowed are in flight.
            Conflict: a request with this id is in flight.
            RequestTimeout: it took longer than allowed; its work is cancelled.
        """
        self._check(rid)
        scope = asyncio.timeout(self._timeout_s)
        self._scopes[rid] = scope
        self._idle.clear()
        try:
            async with scope:
                yield
        except TimeoutError:
            if not scope.expired():
                raise
            if self._is_ending:
                raise Draining(f"request {rid!r} was ended by the shutdown of its server") from None
            raise RequestTimeout(
                f"request {rid!r} took longer than request_timeout_s={self._timeout_s:g}; "
                "ask for fewer tokens, or raise it"
            ) from None
        finally:
            del self._scopes[rid]
            if not self._scopes:
                self._idle.set()

    async def until_idle(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; false if something still is after this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self) -> None:
        """Cancel the work of every request in flight."""
        self._is_ending = True
        now = asyncio.get_running_loop().time()
        for scope in self._scopes.values():
            if not scope.expired():
                scope.reschedule(now)

    def _check(self, rid: str) -> None:
        if self.draining.is_set():
            raise Draining("this server is draining: it shuts down; send the request elsewhere")
        if rid in self._scopes:
            raise Conflict(f"request {rid!r} is in flight; wait for it, or choose another rid")
        if self._max_in_flight is not None and self.in_flight >= self._max_in_flight:
            raise QueueFull(
                f"max_in_flight={self._max_in_flight} requests are in flight; try again later"
            )
