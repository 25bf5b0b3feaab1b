"""Many generation servers behind one face: registration, routing, publication, drain, loss.

A server reports itself every second (`members`), here or to another gateway (`roll_call`). It takes
traffic only in state `ready`, that is with the committed version; `publication` and `catch_up` see to
that. How a single request finds its server is told in `dispatch`.
"""

from __future__ import annotations

import asyncio
import logging

from prometheus_client import CollectorRegistry

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import Conflict, ServiceError
from headway.contracts.http.generation import GenerationAbortRequest
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.paths import GENERATION_ABORT
from headway.contracts.http.servers import (
    ScaleResponse,
    ServerReport,
    ServerReportResponse,
    ServerStatus,
)
from headway.contracts.http.weights import ReservationStatus, WeightReservation, WeightStatus
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, WeightUpdateMeta
from headway.rollout.fleet.dispatch import Dispatch
from headway.rollout.fleet.members import Member, Members
from headway.rollout.fleet.metrics import show_fleet
from headway.rollout.fleet.registry.base import Registry
from headway.rollout.fleet.registry.memory import MemoryRegistry
from headway.rollout.fleet.roll_call import INTERVAL_S, RollCall
from headway.rollout.fleet.scale import Scaler
from headway.rollout.publishing.book import WeightBook
from headway.rollout.publishing.publication import Publications
from headway.rollout.signal import Signal

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0


class Fleet:
    """`Generator` over the servers that reported themselves."""

    def __init__(
        self,
        config: FleetConfig,
        book: WeightBook,
        token: str | None = None,
        metrics: CollectorRegistry | None = None,
        registry: Registry | None = None,
        place: str = "",
    ) -> None:
        """Args:
        book: opened; of the ledger.
        token: what servers ask for.
        metrics: where the fleet's figures are shown.
        registry: opened; what gateways of a shared ledger have in common. None knows of this one only.
        place: of this gateway; see `ledger.owner`.
        """
        metrics = metrics or CollectorRegistry()
        self._book = book
        self._members = Members(config, token)
        self._publications = Publications(config, self._members, book, metrics, place)
        self._roll_call = RollCall(
            registry or MemoryRegistry(),
            self._members,
            self._publications,
            config.lease_s,
            book.notes.is_shared,
        )
        self._dispatch = Dispatch(config, self._members, book, self.has)
        self._scaler = Scaler(config, metrics)
        show_fleet(metrics, self.statuses, lambda: self._members.num_quarantines)

    async def start(self) -> None:
        """Open connections, learn who is there, and begin to watch leases.

        Raises:
            StateError: the registry or the ledger cannot be reached.
        """
        await self._publications.start()
        await self._members.start()
        await self._roll_call.start()

    async def aclose(self) -> None:
        """Close connections; requests in flight fail."""
        await self._roll_call.aclose()
        await self._members.aclose()

    @property
    def version(self) -> PolicyVersion:
        """Committed version of the fleet."""
        return self._book.version

    @property
    def head(self) -> PolicyVersion:
        """The newest published version."""
        return self._book.head

    @property
    def turned(self) -> Signal:
        """Raised when another version serves or is the newest, by whichever gateway."""
        return self._book.turned

    @property
    def updates_in_flight(self) -> int:
        """Committed updates during which at least one sequence was being generated."""
        return self._publications.updates_in_flight

    @property
    def generated_tokens(self) -> int:
        """Tokens that were reported, also by servers that are gone."""
        return self._members.generated_tokens

    def statuses(self) -> list[ServerStatus]:
        """Every server that was seen lately."""
        return self._members.statuses()

    def weights(self) -> WeightStatus:
        """What serves, what is kept, and whether a publication is under way."""
        return self._publications.status()

    def report(self, report: ServerReport) -> ServerReportResponse:
        """Registration or heartbeat."""
        member = self._roll_call.heed(report)
        return ServerReportResponse(state=member.shown_state, version=self.version)

    async def drain(self, server_id: str, drain: bool = True) -> ServerStatus:
        """Send nothing new to a server, and let what runs there go on elsewhere; or end that.

        It holds for all gateways and until it is undone; the server stays up and keeps reporting.

        Raises:
            NotFound: no server of this name is here.
            Conflict: it shuts down: that cannot be undone.
            StateError: other gateways cannot be told.
        """
        member = self._members.find(server_id)
        if member.report.draining and not drain:
            raise Conflict(f"server {server_id!r} shuts down: its drain cannot be undone")
        await self._roll_call.hold(server_id, drain)
        if drain:
            self._dispatch.forget(server_id)
            await self._end_running(member)
        else:
            self._publications.review(member)
        return ServerStatus(**member.report.model_dump(), state=member.shown_state)

    async def _end_running(self, member: Member) -> None:
        """Every sequence there is answered with its tokens so far."""
        if self._book.notes.is_shared:
            await asyncio.sleep(2 * INTERVAL_S)  # until no other gateway sends anything there
        order = GenerationAbortRequest(rid=None)
        try:
            await self._members.order(member, GENERATION_ABORT, order, ABORT_TIMEOUT_S)
        except ServiceError as error:
            log.warning("running requests go on", extra={"server": member.name, "why": str(error)})

    def scale(self, counts: LedgerCounts, headroom: int | None) -> ScaleResponse:
        """How many servers the work asks for; to be asked every few seconds.

        Args:
            counts: of the ledger.
            headroom: trajectories that staleness lets start now; None has no bound.
        """
        return self._scaler.scale(self.statuses(), counts, headroom)

    async def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> PolicyVersion:
        return await self._publications.publish(meta, policy)

    async def cancel_update(self, version: PolicyVersion) -> None:
        await self._publications.retract(version)

    async def rollback(self, version: PolicyVersion) -> WeightStatus:
        """Serve a kept version until the next one is published.

        Raises:
            NotFound: it is not kept.
            SyncError: it cannot be staged any more; what serves goes on.
        """
        await self._publications.rollback(version)
        return self.weights()

    async def pin(self, version: PolicyVersion | None) -> WeightStatus:
        """Serve a kept version and hold it while others are published; None goes on with the newest.

        Raises:
            NotFound, SyncError: as `rollback`.
        """
        await self._publications.pin(version)
        return self.weights()

    def has(self, version: PolicyVersion) -> bool:
        return self._publications.has(version)

    async def reserve(self, wanted: WeightReservation) -> ReservationStatus:
        """See `Publications.reserve`."""
        return await self._publications.reserve(wanted)

    async def end_reservation(self, name: str) -> None:
        """See `Publications.end_reservation`."""
        await self._publications.end_reservation(name)

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        """See `Dispatch.agenerate`."""
        return await self._dispatch.agenerate(req)
