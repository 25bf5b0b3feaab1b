"""The generation servers that reported themselves, and every call to them.

A server that is silent for `lease_s`, or refuses a connection, is `lost`: calls to it fail with
`BackendError` at once. It returns by reporting. One that fails requests is quarantined; one answer that
cannot have been sampled is enough for that.

Some report to this gateway, the others to another one that passes their reports on (`membership_sync`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from gateway.fleet.health import Health
from gateway.fleet.member import Member
from gateway.fleet.response_validator import ResponseValidator
from headway.contracts.config.base import Config
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.context import ContextLimits
from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError, Draining, NotFound, ServiceError
from headway.contracts.http.adapters import adapter_views
from headway.contracts.http.servers import ServerReport, ServerStatus
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from headway.runtime.clock import monotonic
from headway.runtime.connections import Connections, NoResponse
from headway.runtime.server_calls import (
    InvalidGeneration,
    generation_headers,
    post_generate,
    send_order,
)
from headway.runtime.tasks import Signal, cancel_and_wait
from headway.runtime.tls import client_context
from headway.text.vocabulary import ANY, Vocabulary

log = logging.getLogger(__name__)

LIES = (InvalidGeneration, NoResponse)
"""Causes of the errors of a server that sent what it may not."""
T = TypeVar("T")
Answer = TypeVar("Answer", bound=Config)

MAX_CONNECTIONS = 4096
CLIENT_KEEP_ALIVE_S = 30.0
CONNECT_TIMEOUT_S = 5.0
FORGET_LOST_S = 600.0
"""Seconds for which a server that fell silent stays in the list after its lease."""


class Members:
    """The table of servers; used on one event loop."""

    def __init__(
        self,
        config: FleetConfig,
        bounds: ResponseValidator,
        token: str | None = None,
        vocabulary: Vocabulary = ANY,
    ) -> None:
        self.arrival = Signal()
        """Raised when a server joins, becomes ready or has room again."""
        self.is_open = False
        self.num_quarantines = 0
        """Number of quarantines that began."""
        self.is_out_of_sync = False
        """True while other gateways cannot be heard: no silence then loses their servers."""
        self.by_name: dict[str, Member] = {}
        """Every server that was seen lately."""
        self._config = config
        self._bounds = bounds
        self._vocabulary = vocabulary
        self._opened_at = 0.0
        self._lease_s = config.lease_s
        self._token = token
        self._forgotten_tokens = 0
        self._connections: Connections | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open connections and begin to watch leases."""
        self.is_open = True
        self._opened_at = monotonic()
        self._connections = Connections(
            client_context(),
            generation_headers(self._token),
            MAX_CONNECTIONS,
            CONNECT_TIMEOUT_S,
            CLIENT_KEEP_ALIVE_S,
        )
        self._watch = asyncio.create_task(self._watch_leases(), name="watch leases")

    async def aclose(self) -> None:
        """Close connections; calls in flight fail."""
        self.is_open = False
        await cancel_and_wait([self._watch])
        for member in self.by_name.values():
            self.lose(member, "the gateway is shutting down")
        catching_up = [member.catching_up for member in self.by_name.values() if member.catching_up]
        await asyncio.gather(*catching_up, return_exceptions=True)
        if self._connections is not None:
            await self._connections.aclose()

    @property
    def generated_tokens(self) -> int:
        """Tokens that were reported, also by servers that are gone."""
        known = sum(member.report.generated_tokens for member in self.by_name.values())
        return known + self._forgotten_tokens

    def statuses(self) -> list[ServerStatus]:
        """Every server that was seen lately."""
        return [member.status for member in self.by_name.values()]

    def context_limits(self) -> ContextLimits:
        """Return the limits of every server that was seen lately: one that drains or was lost may
        come back."""
        return ContextLimits.of(member.report for member in self.by_name.values())

    def ready(self) -> list[Member]:
        """The servers that take traffic."""
        return [member for member in self.by_name.values() if member.state == "ready"]

    def serving(self) -> list[Member]:
        """The servers that take requests, if only for the version that is reserved."""
        return [member for member in self.by_name.values() if member.is_serving]

    def at(self, version: PolicyVersion) -> list[Member]:
        """The servers that take requests for exactly this version."""
        return [one for one in self.serving() if one.report.version == version]

    def find(self, server_id: str) -> Member:
        """The server of this name.

        Raises:
            NotFound: it is lost, or was never here.
        """
        member = self.by_name.get(server_id)
        if member is None or member.state == "lost":
            known = [one.name for one in self.by_name.values() if one.state != "lost"]
            raise NotFound(f"no server {server_id!r} is here; known: {known}")
        return member

    def present(self) -> list[Member]:
        """The servers that are here to stay, whatever version they serve."""
        return [
            member for member in self.by_name.values() if not (member.is_leaving or member.mismatch)
        ]

    async def until_back(self, count: int) -> None:
        """Wait until that many servers are here, as long as the leases of a former process last."""
        await self.until_present(count, self._opened_at + self._lease_s)

    async def until_present(self, count: int, deadline: float) -> None:
        """Wait until that many servers are here, or the deadline (monotonic clock) is over."""
        arrival = self.arrival.event()
        while len(self.present()) < count and (left_s := deadline - monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await arrival.wait()
            arrival = self.arrival.event()

    def on_report(self, report: ServerReport) -> Member:
        """Registration or heartbeat."""
        member = self._take(report)
        member.is_own = True
        member.last_seen = monotonic()
        return member

    def on_shared_report(self, report: ServerReport, age_s: float) -> Member | None:
        """Take a server's report to another gateway, some seconds old; return None if it is no
        news."""
        seen_at = monotonic() - age_s
        known = self.by_name.get(report.server_id)
        if known is not None and seen_at < max(known.last_seen, known.lost_at):
            return None
        member = self._take(report)
        member.is_own = False
        member.last_seen = seen_at
        return member

    def _take(self, report: ServerReport) -> Member:
        member = self.by_name.get(report.server_id)
        if member is None or member.state == "lost":
            member = self._join(report)
        elif member.is_serving and report.uptime_s < member.report.uptime_s:
            log.warning("server restarted", extra={"server": member.name})
            member.state = "joining"
            self._forgotten_tokens += member.report.generated_tokens
        member.report = report
        member.mismatch = self._vocabulary.mismatch(report)
        if report.draining:
            self.drain(member)
        return member

    def _join(self, report: ServerReport) -> Member:
        log.info("server joins", extra={"server": report.server_id, "version": report.version})
        for other in self.by_name.values():
            if other.report.url == report.url:
                self.lose(other, f"{report.server_id} has its address")
        before = self.by_name.get(report.server_id)
        health = Health(self._config.max_failures, self._config.quarantine_s)
        if before is not None:
            health = before.health
        member = Member(report, "joining", monotonic(), health)
        member.drain_requested = before is not None and before.drain_requested
        if member.drain_requested:
            self.drain(member)
        self.by_name[report.server_id] = member
        self.arrival.notify()
        return member

    def set_draining(self, member: Member, drain_requested: bool) -> None:
        """Let it drain by order, or join again.

        One that shuts down drains anyway.
        """
        if drain_requested:
            member.drain_requested = True
            self.drain(member)
        elif member.drain_requested:
            member.drain_requested = False
            if member.state == "draining" and not member.report.draining:
                log.info("server joins again", extra={"server": member.name})
                member.state = "joining"

    def note_room(self, member: Member) -> None:
        """A request ended there: its place is free, whatever the server had said before."""
        if member.busy_until and member.busy_until > monotonic():
            member.busy_until = 0.0
            self.arrival.notify()

    def note_version(self, member: Member, version: PolicyVersion, digest: str | None) -> None:
        """It answered what it serves: newer than what another gateway still reports of it."""
        serving = {"version": version, "digest": digest}
        member.report = member.report.model_copy(update=serving)
        member.last_seen = monotonic()

    def note_adapters(self, member: Member, adapters: Mapping[str, PolicyVersion]) -> None:
        """It answered that it holds these, which its last report did not know yet."""
        held = {"adapters": adapter_views(adapters)}
        member.report = member.report.model_copy(update=held)
        self.arrival.notify()

    async def generate(
        self, member: Member, req: LLMRequest, rid: str, on_delta: OnDelta | None = None
    ) -> LLMResponse:
        """See `post_generate`; how it ends shows the server's health."""
        is_trial = member.health.begin()
        url, vocab_size = member.report.url, self._bounds.vocab_size
        try:
            call = post_generate(
                self._http, url, req, rid=rid, vocab_size=vocab_size, on_delta=on_delta
            )
            response = await self._call(member, call)
            # Versions of an adapter are its own.
            if req.adapter is None and not self._bounds.knows(response):
                await self._bounds.check(response, url)
        except ServiceError as error:
            self._blame(member, error, is_trial)
            raise
        else:
            member.health.succeed()
            return response
        finally:
            if is_trial:
                member.health.end_trial()
                self.arrival.notify()

    def _blame(self, member: Member, error: ServiceError, is_trial: bool) -> None:
        """Count what is a server's fault: not its absence, nor what any server would refuse."""
        is_fault = isinstance(error, BackendError) or type(error) is ServiceError
        if isinstance(error, Draining) or not is_fault or member.state == "lost":
            return
        self._fail(member, str(error), is_trial, isinstance(error.__cause__, LIES))

    def charge(self, member: Member, reason: str) -> None:
        """It failed a request that another server could answer."""
        if member.state != "lost":
            self._fail(member, reason, is_trial=False)

    def _fail(
        self, member: Member, reason: str, is_trial: bool = True, at_once: bool = False
    ) -> None:
        if member.health.fail(monotonic(), is_trial, at_once, reason):
            self.num_quarantines += 1
            log.warning("server quarantined", extra={"server": member.name, "reason": reason})

    async def order(
        self,
        member: Member,
        path: str,
        body: BaseModel | None,
        timeout_s: float,
        method: str = "POST",
    ) -> bytes:
        """See `send_order`."""
        target = member.report.url + path
        return await self._call(member, send_order(self._http, target, body, timeout_s, method))

    async def ask(
        self, member: Member, path: str, body: BaseModel, answer: type[Answer], timeout_s: float
    ) -> Answer:
        """An order with an answer.

        Raises:
            BackendError: it is gone or too slow, or answered something else.
            ServiceError: whatever it raised.
        """
        content = await self.order(member, path, body, timeout_s)
        try:
            return answer.from_response(content)
        except ValidationError as error:
            raise BackendError(
                f"it answered with no {answer.__name__}: {content[:200]!r}"
            ) from error

    async def _call(self, member: Member, work: Coroutine[Any, Any, T]) -> T:
        """Await an answer, for as long as the server is not lost."""
        try:
            return await work
        except Draining:
            self.drain(member)
            raise
        except BackendError as error:
            if isinstance(error.__cause__, ConnectionError):
                if member.state != "lost":
                    self._fail(member, str(error))  # one that breaks off and comes back is ill, too
                self.lose(member, str(error), has_died=True)
            raise

    def set_ready(self, member: Member, is_reserved: bool = False) -> None:
        """It has the committed version, or the reserved one."""
        member.num_deviations = 0
        if not member.is_leaving:
            member.state = "reserved" if is_reserved else "ready"
            self.arrival.notify()

    def set_joining(self, member: Member) -> None:
        """It is to serve another version than it did."""
        member.num_deviations = 0
        if not member.is_leaving:
            member.state = "joining"

    def fence(self, member: Member, reason: str) -> None:
        """It takes no traffic until it has caught up."""
        if not member.is_leaving:
            if (member.state, member.reason) != ("fenced", reason):
                log.warning("server fenced", extra={"server": member.name, "reason": reason})
            member.state, member.reason = "fenced", reason

    def drain(self, member: Member) -> None:
        """It takes nothing new; what runs there may end."""
        if not member.is_leaving:
            log.info("server drains", extra={"server": member.name})
            member.state = "draining"

    def lose(self, member: Member, reason: str, *, has_died: bool = False) -> None:
        """Make calls to it fail now, so that they may be sent to another server."""
        if member.state == "lost":
            return
        level = logging.INFO if member.state == "draining" else logging.WARNING
        log.log(level, "server lost", extra={"server": member.name, "reason": reason})
        member.state, member.reason = "lost", reason
        member.has_died = has_died
        member.lost_at = monotonic()
        if self._connections is not None:
            self._connections.drop(member.report.url, f"server {member.name} was lost")

    async def _watch_leases(self) -> None:
        while True:
            before = monotonic()
            await asyncio.sleep(self._lease_s / 4)
            if monotonic() - before > self._lease_s / 2:
                continue  # this process was stopped or starved: heartbeats wait in its own sockets
            for name, member in list(self.by_name.items()):
                silent_s = monotonic() - member.last_seen
                if not member.is_own and self.is_out_of_sync:
                    continue
                if silent_s > self._lease_s:
                    self.lose(member, f"no heartbeat for {silent_s:.1f} s")
                if silent_s > self._lease_s + FORGET_LOST_S:
                    self._forgotten_tokens += member.report.generated_tokens
                    del self.by_name[name]

    @property
    def _http(self) -> Connections:
        if self._connections is None:
            raise BackendError("the fleet is not started")
        return self._connections
