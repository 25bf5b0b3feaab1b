"""The generation servers that reported themselves, and every call to them.

    joining ─► ready ◄─► fenced        draining, lost: nothing more goes there

`ready` takes traffic. Who has another version than the committed one is `joining` or `fenced` until it
has caught up; `publication` decides that. A server that is silent for `lease_s`, or refuses a
connection, is `lost`: calls to it fail with `BackendError` at once. It returns by reporting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
from pydantic import BaseModel

from headway.contracts.errors import BackendError, Draining
from headway.contracts.http import ServerReport, ServerState, ServerStatus
from headway.contracts.types import LLMRequest, LLMResponse
from headway.rollout.signal import Signal
from headway.runtime.secret import authorization
from headway.runtime.server_calls import post_generate, post_order

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_CONNECTIONS = 4096
CLIENT_KEEP_ALIVE_S = 30.0
CONNECT_TIMEOUT_S = 5.0
FORGET_LOST_S = 600.0
LEAVING: frozenset[ServerState] = frozenset({"draining", "lost"})


@dataclass(eq=False)
class Member:
    """One generation server."""

    report: ServerReport
    """Its newest; version and digest also from what it answered to a commit."""
    state: ServerState
    last_seen: float
    busy_until: float = 0.0
    """It has no room before this moment (monotonic clock)."""
    outstanding_tokens: int = 0
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    num_deviations: int = 0
    """Reports of another version than the committed one, in a row."""
    is_publishing: bool = False
    """It takes part in a transaction, which decides what it serves."""
    catching_up: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Its id."""
        return self.report.server_id

    @property
    def is_leaving(self) -> bool:
        """It drains or is lost."""
        return self.state in LEAVING

    @property
    def is_catching_up(self) -> bool:
        """It is being brought to the committed version."""
        return self.catching_up is not None and not self.catching_up.done()


class Members:
    """The table of servers; used on one event loop."""

    def __init__(self, lease_s: float, token: str | None = None) -> None:
        self.arrival = Signal()
        """Raised when a server joins or becomes ready."""
        self.is_open = False
        self._opened_at = 0.0
        self._lease_s = lease_s
        self._token = token
        self._members: dict[str, Member] = {}
        self._forgotten_tokens = 0
        self._session: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open connections and begin to watch leases."""
        self.is_open = True
        self._opened_at = time.monotonic()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, keepalive_timeout=CLIENT_KEEP_ALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers=authorization(self._token),
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
        if self._session is not None:
            await self._session.close()

    @property
    def generated_tokens(self) -> int:
        """Tokens that were reported, also by servers that are gone."""
        known = sum(member.report.generated_tokens for member in self._members.values())
        return known + self._forgotten_tokens

    def statuses(self) -> list[ServerStatus]:
        """Every server that was seen lately."""
        return [
            ServerStatus(**member.report.model_dump(), state=member.state)
            for member in self._members.values()
        ]

    def ready(self) -> list[Member]:
        """The servers that take traffic."""
        return [member for member in self._members.values() if member.state == "ready"]

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
        member = self._members.get(report.server_id)
        if member is None or member.state == "lost":
            member = self._join(report)
        elif member.state == "ready" and report.uptime_s < member.report.uptime_s:
            log.warning("server restarted", extra={"server": member.name})
            member.state = "joining"
            self._forgotten_tokens += member.report.generated_tokens
        member.report = report
        member.last_seen = time.monotonic()
        if report.draining:
            self.drain(member)
        return member

    def _join(self, report: ServerReport) -> Member:
        log.info("server joins", extra={"server": report.server_id, "version": report.version})
        for other in self._members.values():
            if other.report.url == report.url:
                self.lose(other, f"{report.server_id} has its address")
        member = self._members[report.server_id] = Member(report, "joining", time.monotonic())
        self.arrival.notify()
        return member

    async def generate(self, member: Member, req: LLMRequest) -> LLMResponse:
        """See `post_generate`."""
        return await self._call(member, post_generate(self._http, member.report.url, req))

    async def order(self, member: Member, path: str, body: BaseModel, timeout_s: float) -> bytes:
        """See `post_order`."""
        target = member.report.url + path
        return await self._call(member, post_order(self._http, target, body, timeout_s))

    async def _call(self, member: Member, work: Coroutine[Any, Any, T]) -> T:
        """Await an answer, for as long as the server is not lost."""
        task = asyncio.create_task(work)
        member.calls.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if member.state == "lost" and not _is_cancelled():
                raise BackendError(f"server {member.name} was lost") from None
            task.cancel()
            raise
        except Draining:
            self.drain(member)
            raise
        except BackendError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectionError):
                self.lose(member, str(error))
            raise
        finally:
            member.calls.discard(task)

    def set_ready(self, member: Member) -> None:
        """It has the committed version."""
        member.num_deviations = 0
        if not member.is_leaving:
            member.state = "ready"
            self.arrival.notify()

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
        for task in member.calls:
            task.cancel()

    async def _watch_leases(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._lease_s / 4)
            if time.monotonic() - before > self._lease_s / 2:
                continue  # this process was stopped or starved: heartbeats wait in its own sockets
            for name, member in list(self._members.items()):
                silent_s = time.monotonic() - member.last_seen
                if silent_s > self._lease_s:
                    self.lose(member, f"no heartbeat for {silent_s:.1f} s")
                if silent_s > FORGET_LOST_S:
                    self._forgotten_tokens += member.report.generated_tokens
                    del self._members[name]

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise BackendError("the fleet is not started")
        return self._session


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
