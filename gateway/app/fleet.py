"""Many generation servers behind one object: registration, routing, publication, drain, loss.

A server reports itself every second (`members`), here or to another gateway (`membership_sync`). It takes
traffic only in state `ready`, that is with the committed version; `publication` and `catch_up` see to
that. `dispatch` describes how a single request finds its server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from prometheus_client import CollectorRegistry

from gateway.fleet.dispatch import Dispatcher
from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.fleet.metrics import show_fleet
from gateway.fleet.pause import FleetPause
from gateway.fleet.registry.base import ServerRegistry
from gateway.fleet.registry.memory import MemoryRegistry
from gateway.fleet.response_validator import ResponseValidator
from gateway.fleet.scale import Scaler
from gateway.fleet.shared_aborts import SharedAborts
from gateway.publishing.membership_sync import INTERVAL_S, MembershipSync
from gateway.publishing.publication import Publications
from gateway.versions.publication_state import PublicationState
from headway.contracts.config.gateway import FleetConfig
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
from headway.contracts.types import PolicyVersion
from headway.text.vocabulary import ANY, Vocabulary

log = logging.getLogger(__name__)

ABORT_TIMEOUT_S = 5.0


class Fleet:
    """`Generator` over the servers that reported themselves."""

    def __init__(
        self,
        config: FleetConfig,
        state: PublicationState,
        token: str | None = None,
        metrics: CollectorRegistry | None = None,
        registry: ServerRegistry | None = None,
        place: str = "",
        vocabulary: Vocabulary = ANY,
        ends: Collection[int] = (),
    ) -> None:
        """Args:
        state: opened; of the ledger.
        token: what servers ask for.
        metrics: registry of the fleet's metrics.
        registry: opened; what gateways of a shared ledger have in common. None knows of this one only.
        place: of this gateway; see `ledger.owner`.
        vocabulary: of the gateway; servers with another one get no traffic.
        ends: tokens that may end a sequence.
        """
        metrics = metrics or CollectorRegistry()
        self.state = state
        self.members = members = Members(
            config, ResponseValidator(state, vocabulary.model_size), token, vocabulary
        )
        """The table of servers."""
        self.weights = Publications(config, members, state, metrics, place)
        """Versions that serve, are published, pinned and reserved."""
        self.pause = FleetPause(members, state.notes)
        self.aborts = SharedAborts(state.notes)
        self.membership = MembershipSync(
            registry or MemoryRegistry(),
            members,
            self.weights,
            (self.pause.follow, self.aborts.follow),
            config.lease_s,
            state.notes.is_shared,
        )
        self._dispatch = Dispatcher(
            config, members, state, self.weights.has, self.weights.adapters.check, ends
        )
        self._scaler = Scaler(config, metrics)
        # What `Generator` asks for is the parts' own.
        self.agenerate = self._dispatch.agenerate
        self.abort = self._dispatch.abort
        self.has = self.weights.has
        self.statuses = members.statuses
        show_fleet(metrics, members.statuses, lambda: members.num_quarantines)

    async def start(self) -> None:
        """Open connections, learn who is there, and begin to watch leases.

        Raises:
            StateError: the registry or the ledger cannot be reached.
        """
        await self.weights.start()
        await self.pause.follow()
        await self.members.start()
        await self.membership.start()

    async def aclose(self) -> None:
        """Close connections; requests in flight fail."""
        await self.membership.aclose()
        await self.members.aclose()

    @property
    def version(self) -> PolicyVersion:
        """Committed version of the fleet."""
        return self.state.version

    @property
    def sampled_version(self) -> PolicyVersion:
        """See `Generator`."""
        return self.weights.sampled_version

    @property
    def head(self) -> PolicyVersion:
        """The newest published version."""
        return self.state.head

    @property
    def updates_in_flight(self) -> int:
        """Committed updates during which at least one sequence was being generated."""
        return self.weights.updates_in_flight

    @property
    def generated_tokens(self) -> int:
        """Tokens that were reported, also by servers that are gone."""
        return self.members.generated_tokens

    def report(self, report: ServerReport) -> ServerReportResponse:
        """Registration or heartbeat."""
        member = self.membership.on_report(report)
        self.pause.review(member)
        shown = member.status
        return ServerReportResponse(state=shown.state, version=self.version, reason=shown.reason)

    async def drain(self, server_id: str, drain: bool = True) -> ServerStatus:
        """Send nothing new to a server, and let what runs there go on elsewhere; or end that.

        It holds for all gateways and until it is undone; the server stays up and keeps reporting.

        Raises:
            NotFound: no server of this name is here.
            Conflict: it shuts down: that cannot be undone.
            StateError: other gateways cannot be informed.
        """
        member = self.members.find(server_id)
        if member.report.draining and not drain:
            raise Conflict(f"server {server_id!r} shuts down: its drain cannot be undone")
        await self.membership.set_draining(server_id, drain)
        if drain:
            self._dispatch.router.forget(server_id)
            await self._end_running(member)
        else:
            self.weights.review(member)
        return member.status

    async def _end_running(self, member: Member) -> None:
        """Every sequence there is answered with its tokens so far."""
        if self.state.notes.is_shared:
            await asyncio.sleep(2 * INTERVAL_S)  # until no other gateway sends anything there
        order = GenerationAbortRequest(rid=None)
        try:
            await self.members.order(member, GENERATION_ABORT, order, ABORT_TIMEOUT_S)
        except ServiceError as error:
            log.warning("running requests go on", extra={"server": member.name, "why": str(error)})

    @property
    def max_context(self) -> int | None:
        """Tokens per sequence that some server can hold; None while that is not known."""
        return self.members.context_limits().largest

    def scale(self, counts: LedgerCounts, headroom: int | None) -> ScaleResponse:
        """Return the number of servers that the work asks for; to be called every few seconds.

        Args:
            counts: of the ledger.
            headroom: trajectories that staleness lets start now; None has no bound.
        """
        return self._scaler.scale(self.statuses(), counts, headroom)
