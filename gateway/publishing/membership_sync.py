"""Exchange between gateways: servers that reported to them, servers to drain, what was published,
pauses and aborts.

Every `INTERVAL_S` a gateway announces the reports that it was given, reads those of the others, and
then checks the servers that reported since: against the newest publication state, so that none is
checked against a version that another gateway has just replaced.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.fleet.registry.base import ServerRegistry, SharedReport
from gateway.publishing.publication import Publications
from headway.contracts.errors import ServiceError
from headway.contracts.http.servers import ServerReport
from headway.runtime.clock import monotonic
from headway.runtime.tasks import cancel_and_wait

log = logging.getLogger(__name__)

INTERVAL_S = 0.25


class MembershipSync:
    """Keeps `Members` and a registry alike; used on one event loop."""

    def __init__(
        self,
        registry: ServerRegistry,
        members: Members,
        publications: Publications,
        followed: Sequence[Callable[[], Awaitable[None]]],
        lease_s: float,
        has_others: bool,
    ) -> None:
        """Args:
        followed: learn what else other gateways did, with each sync.
        has_others: other gateways may publish too: servers that report here are checked with the
            next sync.
        """
        self._registry = registry
        self._members = members
        self._publications = publications
        self._followed = (publications.follow, *followed)
        self._lease_s = lease_s
        self._has_others = has_others
        self._gateway = uuid.uuid4().hex
        self._heard: dict[str, tuple[ServerReport, float]] = {}
        """What is to be announced, and when it came."""
        self._numbers: dict[str, int] = {}
        self._lock = asyncio.Lock()
        self._calling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learn who is there, and begin to repeat it.

        Raises:
            StateError: the registry or the ledger cannot be reached.
        """
        await self.sync()
        self._calling = asyncio.create_task(self._repeat(), name="membership sync")

    async def aclose(self) -> None:
        """Stop; what was announced stays until its lease ends."""
        await cancel_and_wait([self._calling])

    def on_report(self, report: ServerReport) -> Member:
        """A server has reported here: other gateways read it with the next sync."""
        member = self._members.on_report(report)
        self._heard[report.server_id] = report, monotonic()
        if not self._has_others:
            self._publications.review(member)
        return member

    async def set_draining(self, server_id: str, drain_requested: bool) -> None:
        """Let a server drain on every gateway, or end that; this one knows when it returns.

        Raises:
            NotFound: it is no member.
            StateError: the registry cannot be reached.
        """
        await self.sync()
        await self._registry.set_draining(server_id, drain_requested)
        await self.sync()

    async def sync(self) -> None:
        """Exchange what is new.

        Raises:
            StateError: the registry or the ledger cannot be reached.
        """
        async with self._lock:
            heard, self._heard = self._heard, {}
            reports = [report for report, _ in heard.values()]
            ages_s = [monotonic() - heard_at for _, heard_at in heard.values()]
            try:
                await self._registry.announce(self._gateway, reports, self._lease_s, ages_s)
            except ServiceError:
                self._heard = heard | self._heard
                raise
            shared_reports = await self._registry.members()
            if self._has_others:
                for follow in self._followed:
                    await follow()
            for shared in shared_reports:
                member = self._take(shared)
                if member is not None:
                    self._publications.review(member)

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            try:
                await self.sync()
            except ServiceError as error:
                if not self._members.is_out_of_sync:
                    log.warning("other gateways cannot be heard", extra={"reason": str(error)})
                self._members.is_out_of_sync = True
            else:
                self._members.is_out_of_sync = False

    def _take(self, shared: SharedReport) -> Member | None:
        """Take an entry; return its server if there is something new to check."""
        name, is_own = shared.report.server_id, shared.gateway == self._gateway
        member = self._members.by_name.get(name)
        is_news = shared.number != self._numbers.get(name)
        self._numbers[name] = shared.number
        if is_news and not is_own:
            member = self._members.on_shared_report(shared.report, shared.age_s)
        if member is not None:
            self._members.set_draining(member, shared.drain_requested)
        return member if is_news and (self._has_others or not is_own) else None
