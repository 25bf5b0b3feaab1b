"""What gateways tell each other: who reported to them, who shall drain, and what was published.

Every `INTERVAL_S` a gateway announces the reports that it was given, reads those of the others, and
then judges whoever reported since: against the newest page of the book, so that nobody is judged by a
version that another gateway has just replaced.
"""

from __future__ import annotations

import asyncio
import logging
import uuid

from headway.contracts.errors import ServiceError
from headway.contracts.http.servers import ServerReport
from headway.rollout.fleet.members import Member, Members
from headway.rollout.fleet.registry.base import Registry, Sighting
from headway.rollout.publishing.publication import Publications

log = logging.getLogger(__name__)

INTERVAL_S = 0.25


class RollCall:
    """Keeps `Members` and a registry alike; used on one event loop."""

    def __init__(
        self,
        registry: Registry,
        members: Members,
        publications: Publications,
        lease_s: float,
        has_others: bool,
    ) -> None:
        """Args:
        has_others: other gateways may publish too: who reports here is judged with the next call.
        """
        self._registry = registry
        self._members = members
        self._publications = publications
        self._lease_s = lease_s
        self._has_others = has_others
        self._gateway = uuid.uuid4().hex
        self._heard: dict[str, ServerReport] = {}
        self._numbers: dict[str, int] = {}
        self._turn = asyncio.Lock()
        self._calling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learn who is there, and begin to repeat it.

        Raises:
            StateError: the registry or the ledger cannot be reached.
        """
        await self.call()
        self._calling = asyncio.create_task(self._repeat(), name="roll call")

    async def aclose(self) -> None:
        """Stop; what was announced stays until its lease ends."""
        if self._calling is not None:
            self._calling.cancel()
            await asyncio.gather(self._calling, return_exceptions=True)

    def heed(self, report: ServerReport) -> Member:
        """A server has reported here: others hear of it with the next call."""
        member = self._members.heed(report)
        self._heard[report.server_id] = report
        if not self._has_others:
            self._publications.review(member)
        return member

    async def hold(self, server_id: str, is_held: bool) -> None:
        """Let a server drain on every gateway, or end that; this one knows when it returns.

        Raises:
            NotFound: it is no member.
            StateError: the registry cannot be reached.
        """
        await self.call()
        await self._registry.hold(server_id, is_held)
        await self.call()

    async def call(self) -> None:
        """Exchange what is new.

        Raises:
            StateError: the registry or the ledger cannot be reached.
        """
        async with self._turn:
            heard, self._heard = self._heard, {}
            try:
                await self._registry.announce(self._gateway, list(heard.values()), self._lease_s)
            except ServiceError:
                self._heard = heard | self._heard
                raise
            sightings = await self._registry.members()
            await self._publications.follow()
            for sighting in sightings:
                member = self._take(sighting)
                if member is not None:
                    self._publications.review(member)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.call()
            except ServiceError as error:
                if not self._members.is_blind:
                    log.warning("other gateways cannot be heard", extra={"reason": str(error)})
                self._members.is_blind = True
            else:
                self._members.is_blind = False

    def _take(self, sighting: Sighting) -> Member | None:
        """Who is to be judged by it: it is new."""
        name, is_own = sighting.report.server_id, sighting.gateway == self._gateway
        member = self._members.get(name)
        is_news = sighting.number != self._numbers.get(name)
        self._numbers[name] = sighting.number
        if is_news and not is_own:
            member = self._members.overhear(sighting.report, sighting.age_s)
        if member is not None:
            self._members.hold(member, sighting.is_held)
        return member if is_news and (self._has_others or not is_own) else None
