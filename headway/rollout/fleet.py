"""Many generation servers behind one face: registration, routing, publication, loss.

A server reports itself every second (`members`). It takes traffic only in state `ready`, that is with
the committed version; `publication` and `catch_up` see to that.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import aiohttp
from prometheus_client import CollectorRegistry

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import BackendError, Draining, QueueFull
from headway.contracts.http import ServerReport, ServerReportResponse, ServerStatus, WeightStatus
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, WeightUpdateMeta
from headway.rollout.members import Member, Members
from headway.rollout.publication import Publications
from headway.rollout.routing import Router, load_of
from headway.rollout.weight_book import WeightBook

JITTER = 0.25
"""Share by which the wait for a full server varies."""
RID_CHARS = 119
"""Of a request's id, so that a suffix fits."""


class Fleet:
    """`Generator` over the servers that reported themselves."""

    def __init__(
        self,
        config: FleetConfig,
        book: WeightBook,
        token: str | None = None,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        self._server_wait_s = config.server_wait_s
        self._book = book
        self._members = Members(config.lease_s, token)
        registry = metrics or CollectorRegistry()
        self._publications = Publications(config, self._members, book, registry)
        self._router = Router()

    async def start(self) -> None:
        """Open connections and begin to watch leases."""
        await self._members.start()

    async def aclose(self) -> None:
        """Close connections; requests in flight fail."""
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
        member = self._members.heed(report)
        self._publications.review(member)
        return ServerReportResponse(state=member.state, version=self.version)

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

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        # An id of its own each time: a server may not have noticed yet that a request sent before
        # was given up.
        sent = req.model_copy(update={"rid": f"{req.rid[:RID_CHARS]}.{uuid.uuid4().hex[:8]}"})
        deadline = time.monotonic() + self._server_wait_s
        while True:
            member = await self._choose(req, deadline)
            try:
                with _outstanding(member, req):
                    response = await self._members.generate(member, sent)
            except Draining:
                pass
            except BackendError as error:
                # Nothing was sent over a connection that was refused.
                if not isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    raise
            except QueueFull as error:
                wait_s = error.retry_after_s * random.uniform(1.0, 1.0 + JITTER)
                member.busy_until = time.monotonic() + wait_s
            else:
                return response.model_copy(update={"rid": req.rid})

    async def _choose(self, req: LLMRequest, deadline: float) -> Member:
        """The ready server with room that the router names."""
        while True:
            arrival, now = self._members.arrival.event(), time.monotonic()
            ready = self._members.ready()
            free = {member.name: member for member in ready if member.busy_until <= now}
            if free:
                loads = {name: member.outstanding_tokens for name, member in free.items()}
                return free[self._router.choose(req, loads)]
            if now >= deadline:
                known = {status.server_id: status.state for status in self.statuses()}
                raise BackendError(
                    f"no generation server was ready and had room for {self._server_wait_s:g} s; "
                    f"known: {known}"
                )
            until = min([deadline, *(member.busy_until for member in ready)])
            with suppress(TimeoutError):
                async with asyncio.timeout(until - now):
                    await arrival.wait()


@contextmanager
def _outstanding(member: Member, req: LLMRequest) -> Iterator[None]:
    load = load_of(req)
    member.outstanding_tokens += load
    try:
        yield
    finally:
        member.outstanding_tokens -= load
