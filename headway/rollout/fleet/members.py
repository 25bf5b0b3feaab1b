"""The generation servers that reported themselves, and every call to them.

    joining ─► ready, reserved ◄─► fenced        draining, lost: nothing more goes there

`ready` takes traffic, `reserved` that of the one version that it stays at. Who has another version than
it should is `joining` or `fenced` until it has caught up; `publication` decides that. A server that is
silent for `lease_s`, or refuses a connection, is `lost`: calls to it fail with `BackendError` at once. It
returns by reporting. One that is ready and fails requests is shown as `quarantined`: it takes no traffic,
but part in publications.

Some report to this gateway, the others to another one that tells of them (`roll_call`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.context import ContextLimits
from headway.contracts.errors import BackendError, Draining, NotFound, ServiceError
from headway.contracts.http.servers import ServerReport, ServerState, ServerStatus
from headway.contracts.http.weights import WeightRecord
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion
from headway.rollout.fleet.health import Health
from headway.rollout.signal import Signal
from headway.runtime.connections import Connections
from headway.runtime.secret import authorization
from headway.runtime.server_calls import post_generate, post_order
from headway.runtime.tls import client_context

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONNECTIONS = 4096
CLIENT_KEEP_ALIVE_S = 30.0
CONNECT_TIMEOUT_S = 5.0
FORGET_LOST_S = 600.0
LEAVING: frozenset[ServerState] = frozenset({"draining", "lost"})
SERVING: frozenset[ServerState] = frozenset({"ready", "reserved"})


@dataclass(eq=False)
class Member:
    """One generation server."""

    report: ServerReport
    """Its newest; version and digest also from what it answered to a commit."""
    state: ServerState
    last_seen: float
    health: Health
    lost_at: float = 0.0
    is_own: bool = True
    """It reports to this gateway, which brings it to the committed version."""
    is_held: bool = False
    """It drains by order, until that is undone."""
    busy_until: float = 0.0
    """It has no room before this moment (monotonic clock)."""
    outstanding_tokens: int = 0
    num_deviations: int = 0
    """Reports of another version than the committed one, in a row."""
    deviates_from: WeightRecord | None = None
    """What was committed when the last of them was looked at."""
    is_publishing: bool = False
    """It takes part in a transaction, which decides what it serves."""
    catching_up: asyncio.Task[None] | None = None
    aims_at: WeightRecord | None = None
    """What it is being brought to."""

    @property
    def name(self) -> str:
        """Its id."""
        return self.report.server_id

    @property
    def is_leaving(self) -> bool:
        """It drains or is lost."""
        return self.state in LEAVING

    @property
    def is_serving(self) -> bool:
        """It takes requests, if only for one version."""
        return self.state in SERVING

    @property
    def shown_state(self) -> ServerState:
        """Its state, as others are told."""
        is_ill = self.is_serving and self.health.is_quarantined
        return "quarantined" if is_ill else self.state

    def is_free(self, now: float) -> bool:
        """Whether a request may be sent to it."""
        return self.is_serving and self.busy_until <= now and self.health.admits(now)

    def holds(self, num_tokens: int) -> bool:
        """Whether it can hold a sequence; yes while it does not tell its limit."""
        limit = self.report.max_context_tokens
        return limit is None or num_tokens <= limit

    def free_at(self) -> float:
        """When it may be, as far as that is known; infinite while a trial goes on."""
        until = self.health.until
        return self.busy_until if until is None else max(self.busy_until, until)

    @property
    def is_catching_up(self) -> bool:
        """It is being brought to the committed version."""
        return self.catching_up is not None and not self.catching_up.done()


class Members:
    """The table of servers; used on one event loop."""

    def __init__(self, config: FleetConfig, token: str | None = None) -> None:
        self.arrival = Signal()
        """Raised when a server joins, becomes ready or has room again."""
        self.is_open = False
        self.num_quarantines = 0
        """That began."""
        self.is_blind = False
        """What other gateways are told cannot be heard: their servers are lost by nobody's silence."""
        self._config = config
        self._opened_at = 0.0
        self._lease_s = config.lease_s
        self._token = token
        self._members: dict[str, Member] = {}
        self._forgotten_tokens = 0
        self._connections: Connections | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open connections and begin to watch leases."""
        self.is_open = True
        self._opened_at = time.monotonic()
        self._connections = Connections(
            client_context(),
            authorization(self._token),
            MAX_CONNECTIONS,
            CONNECT_TIMEOUT_S,
            CLIENT_KEEP_ALIVE_S,
        )
        self._watch = asyncio.create_task(self._watch_leases(), name="watch leases")

    async def aclose(self) -> None:
        """Close connections; calls in flight fail."""
        self.is_open = False
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for member in self._members.values():
            self.lose(member, "the gateway is shutting down")
        catching_up = [
            member.catching_up for member in self._members.values() if member.catching_up
        ]
        await asyncio.gather(*catching_up, return_exceptions=True)
        if self._connections is not None:
            await self._connections.aclose()

    @property
    def generated_tokens(self) -> int:
        """Tokens that were reported, also by servers that are gone."""
        known = sum(member.report.generated_tokens for member in self._members.values())
        return known + self._forgotten_tokens

    def statuses(self) -> list[ServerStatus]:
        """Every server that was seen lately."""
        return [
            ServerStatus(**member.report.model_dump(), state=member.shown_state)
            for member in self._members.values()
        ]

    def context_limits(self) -> ContextLimits:
        """Of every server that was seen lately: one that drains or was lost may come back."""
        return ContextLimits.of(member.report for member in self._members.values())

    def ready(self) -> list[Member]:
        """The servers that take traffic."""
        return [member for member in self._members.values() if member.state == "ready"]

    def serving(self) -> list[Member]:
        """The servers that take requests, if only for the version that is reserved."""
        return [member for member in self._members.values() if member.is_serving]

    def at(self, version: PolicyVersion) -> list[Member]:
        """The servers that take requests for exactly this version."""
        return [one for one in self.serving() if one.report.version == version]

    def get(self, server_id: str) -> Member | None:
        """The server of this name."""
        return self._members.get(server_id)

    def find(self, server_id: str) -> Member:
        """The server of this name.

        Raises:
            NotFound: it is lost, or was never here.
        """
        member = self.get(server_id)
        if member is None or member.state == "lost":
            known = [one.name for one in self._members.values() if one.state != "lost"]
            raise NotFound(f"no server {server_id!r} is here; known: {known}")
        return member

    def present(self) -> list[Member]:
        """The servers that are here to stay, whatever they serve."""
        return [member for member in self._members.values() if not member.is_leaving]

    async def until_back(self, count: int) -> None:
        """Wait until so many servers are here, as long as the leases of a former process last."""
        await self.until_present(count, self._opened_at + self._lease_s)

    async def until_present(self, count: int, deadline: float) -> None:
        """Wait until so many servers are here, or the deadline (monotonic clock) is over."""
        arrival = self.arrival.event()
        while len(self.present()) < count and (left_s := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await arrival.wait()
            arrival = self.arrival.event()

    def heed(self, report: ServerReport) -> Member:
        """Registration or heartbeat."""
        member = self._take(report)
        member.is_own = True
        member.last_seen = time.monotonic()
        return member

    def overhear(self, report: ServerReport, age_s: float) -> Member | None:
        """What a server said to another gateway, some seconds ago; None if it is old news."""
        seen_at = time.monotonic() - age_s
        known = self._members.get(report.server_id)
        if known is not None and seen_at < max(known.last_seen, known.lost_at):
            return None
        member = self._take(report)
        member.is_own = False
        member.last_seen = seen_at
        return member

    def _take(self, report: ServerReport) -> Member:
        member = self._members.get(report.server_id)
        if member is None or member.state == "lost":
            member = self._join(report)
        elif member.is_serving and report.uptime_s < member.report.uptime_s:
            log.warning("server restarted", extra={"server": member.name})
            member.state = "joining"
            self._forgotten_tokens += member.report.generated_tokens
        member.report = report
        if report.draining:
            self.drain(member)
        return member

    def _join(self, report: ServerReport) -> Member:
        log.info("server joins", extra={"server": report.server_id, "version": report.version})
        for other in self._members.values():
            if other.report.url == report.url:
                self.lose(other, f"{report.server_id} has its address")
        before = self._members.get(report.server_id)
        health = Health(self._config.max_failures, self._config.quarantine_s)
        if before is not None:
            health = before.health
        member = Member(report, "joining", time.monotonic(), health)
        member.is_held = before is not None and before.is_held
        if member.is_held:
            self.drain(member)
        self._members[report.server_id] = member
        self.arrival.notify()
        return member

    def hold(self, member: Member, is_held: bool) -> None:
        """Let it drain by order, or join again.

        One that shuts down drains anyway.
        """
        if is_held:
            member.is_held = True
            self.drain(member)
        elif member.is_held:
            member.is_held = False
            if member.state == "draining" and not member.report.draining:
                log.info("server joins again", extra={"server": member.name})
                member.state = "joining"

    def note_room(self, member: Member) -> None:
        """A request ended there: its place is free, whatever the server had said before."""
        if member.busy_until > time.monotonic():
            member.busy_until = 0.0
            self.arrival.notify()

    def note_version(self, member: Member, version: PolicyVersion, digest: str | None) -> None:
        """It answered what it serves: newer than what another gateway still tells of it."""
        serving = {"version": version, "digest": digest}
        member.report = member.report.model_copy(update=serving)
        member.last_seen = time.monotonic()

    async def generate(self, member: Member, req: LLMRequest, rid: str) -> LLMResponse:
        """See `post_generate`; how it ends tells of the server's health."""
        is_trial = member.health.begin()
        try:
            call = post_generate(self._http, member.report.url, req, rid=rid)
            response = await self._call(member, call)
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
        self._fail(member, str(error), is_trial)

    def _fail(self, member: Member, reason: str, is_trial: bool = True) -> None:
        if member.health.fail(time.monotonic(), is_trial):
            self.num_quarantines += 1
            log.warning("server quarantined", extra={"server": member.name, "reason": reason})

    async def order(self, member: Member, path: str, body: BaseModel, timeout_s: float) -> bytes:
        """See `post_order`."""
        target = member.report.url + path
        return await self._call(member, post_order(self._http, target, body, timeout_s))

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
                self.lose(member, str(error))
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
            log.warning("server fenced", extra={"server": member.name, "reason": reason})
            member.state = "fenced"

    def drain(self, member: Member) -> None:
        """It takes nothing new; what runs there may end."""
        if not member.is_leaving:
            log.info("server drains", extra={"server": member.name})
            member.state = "draining"

    def lose(self, member: Member, reason: str) -> None:
        """What is asked of it fails now, so that it may be asked of another."""
        if member.state == "lost":
            return
        level = logging.INFO if member.state == "draining" else logging.WARNING
        log.log(level, "server lost", extra={"server": member.name, "reason": reason})
        member.state = "lost"
        member.lost_at = time.monotonic()
        if self._connections is not None:
            self._connections.cut(member.report.url, f"server {member.name} was lost")

    async def _watch_leases(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._lease_s / 4)
            if time.monotonic() - before > self._lease_s / 2:
                continue  # this process was stopped or starved: heartbeats wait in its own sockets
            for name, member in list(self._members.items()):
                silent_s = time.monotonic() - member.last_seen
                if not member.is_own and self.is_blind:
                    continue
                if silent_s > self._lease_s:
                    self.lose(member, f"no heartbeat for {silent_s:.1f} s")
                if silent_s > FORGET_LOST_S:
                    self._forgotten_tokens += member.report.generated_tokens
                    del self._members[name]

    @property
    def _http(self) -> Connections:
        if self._connections is None:
            raise BackendError("the fleet is not started")
        return self._connections
