"""A pause of the whole fleet: servers that join it meanwhile are paused, too."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from headway.contracts.config.base import Config
from headway.contracts.errors import ServiceError
from headway.contracts.http.generation import GenerationPauseRequest, PauseMode
from headway.contracts.http.paths import GENERATION_PAUSE, GENERATION_RESUME

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0


class FleetPause:
    """Pauses and resumes the servers; who was not reached is told again when it reports."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._mode: PauseMode | None = None
        self._paused: dict[Member, float] = {}
        """Servers that were paused, and how long they had been up then."""
        self._lock = asyncio.Lock()
        self._reviews: dict[Member, asyncio.Task[None]] = {}

    @property
    def is_on(self) -> bool:
        return self._mode is not None

    async def begin(self, mode: PauseMode) -> None:
        """Pause every server that is here."""
        self._mode = mode
        await self._settle(self._members.present())

    async def end(self) -> None:
        """Let those go on that were paused."""
        self._mode = None
        await self._settle(self._paused)

    def review(self, member: Member) -> None:
        """It reported: see that it does what all do."""
        if member not in self._reviews and self._is_paused(member) != self.is_on:
            task = asyncio.create_task(self._settle([member]), name=f"pause {member.name}")
            self._reviews[member] = task
            task.add_done_callback(lambda _: self._reviews.pop(member))

    def _is_paused(self, member: Member) -> bool:
        """Return whether it was paused and was not started again since then."""
        return self._paused.get(member, math.inf) <= member.report.uptime_s

    async def _settle(self, members: Iterable[Member]) -> None:
        async with self._lock:
            for member in [one for one in self._paused if one.state == "lost"]:
                del self._paused[member]
            await asyncio.gather(*(self._tell(member) for member in tuple(members)))

    async def _tell(self, member: Member) -> None:
        mode, uptime_s = self._mode, member.report.uptime_s
        try:
            if mode is None:
                if self._is_paused(member):
                    await self._members.order(member, GENERATION_RESUME, Config(), TIMEOUT_S)
                self._paused.pop(member, None)
            elif not self._is_paused(member):
                order = GenerationPauseRequest(mode=mode)
                await self._members.order(member, GENERATION_PAUSE, order, TIMEOUT_S)
                self._paused[member] = uptime_s
        except ServiceError as error:
            log.warning("not told of the pause", extra={"server": member.name, "why": str(error)})
