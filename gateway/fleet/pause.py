"""A pause of the whole fleet: servers that join it meanwhile are paused, too.

It is a note in the ledger: it holds for all gateways that share it, and for those that start later.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable

from pydantic import TypeAdapter

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.ledger.base import KeyValueStore
from headway.contracts.config.base import Config
from headway.contracts.errors import BackendError, ServiceError
from headway.contracts.http.generation import GenerationPauseRequest, PauseMode
from headway.contracts.http.paths import GENERATION_PAUSE, GENERATION_RESUME

log = logging.getLogger(__name__)

TIMEOUT_S = 30.0
NOTE = "pause"
_NOTE: TypeAdapter[PauseMode | None] = TypeAdapter(PauseMode | None)


class FleetPause:
    """Pauses and resumes the servers; who was not reached is told again when it reports."""

    def __init__(self, members: Members, notes: KeyValueStore) -> None:
        self._members = members
        self._notes = notes
        self._mode: PauseMode | None = None
        self._paused: dict[Member, float] = {}
        """Servers that were paused, and how long they had been up then."""
        self._setting = asyncio.Lock()
        self._lock = asyncio.Lock()
        self._reviews: dict[Member, asyncio.Task[None]] = {}

    @property
    def is_on(self) -> bool:
        return self._mode is not None

    async def begin(self, mode: PauseMode) -> None:
        """Pause every server that is here.

        Raises:
            BackendError: one was not reached; it is told again when it reports.
            StateError: the ledger cannot be reached.
        """
        await self._set(mode)
        await self._tell_all(self._members.present())

    async def end(self) -> None:
        """Let those go on that were paused.

        Raises:
            BackendError: as `begin`.
        """
        await self._set(None)
        await self._tell_all(self._paused)

    async def follow(self) -> None:
        """Learn what a former process or another gateway has paused, and do it here.

        Raises:
            StateError: the ledger cannot be reached.
        """
        async with self._setting:
            text = await self._notes.get_value(NOTE)
            mode = None if text is None else _NOTE.validate_json(text)
            has_changed, self._mode = mode != self._mode, mode
        if has_changed:
            for member in self._members.present():
                self.review(member)

    async def _set(self, mode: PauseMode | None) -> None:
        async with self._setting:
            await self._notes.set_value(NOTE, _NOTE.dump_json(mode).decode())
            self._mode = mode

    def review(self, member: Member) -> None:
        """It reported: see that it does what all do."""
        if member not in self._reviews and self._is_paused(member) != self.is_on:
            task = asyncio.create_task(self._bring(member), name=f"pause {member.name}")
            self._reviews[member] = task
            task.add_done_callback(lambda _: self._reviews.pop(member))

    async def _bring(self, member: Member) -> None:
        """Tell it until it does what all do; if it cannot be told, until it reports again."""
        while member.state != "lost" and self._is_paused(member) != self.is_on:
            if await self._settle([member]):
                return

    def _is_paused(self, member: Member) -> bool:
        """Return whether it was paused and was not started again since then."""
        return self._paused.get(member, math.inf) <= member.report.uptime_s

    async def _tell_all(self, members: Iterable[Member]) -> None:
        failures = await self._settle(members)
        if failures:
            told = "resume" if self._mode is None else "pause"
            raise BackendError(
                f"not every server was told to {told}: {'; '.join(failures)}. Who was not is told again "
                "when it reports; the others do"
            )

    async def _settle(self, members: Iterable[Member]) -> list[str]:
        """Tell them; what went wrong with those that are still here."""
        async with self._lock:
            for member in [one for one in self._paused if one.state == "lost"]:
                del self._paused[member]
            told = await asyncio.gather(*(self._tell(member) for member in tuple(members)))
            return [failure for failure in told if failure is not None]

    async def _tell(self, member: Member) -> str | None:
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
            return None if member.state == "lost" else f"{member.name}: {error}"
        return None
