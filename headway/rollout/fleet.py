"""Many generation servers behind one face: registration, routing, publication, loss.

A server reports itself every second. It takes traffic only in state `ready`, that is with the
committed version; a newcomer and a server that missed a publication are brought there first
(`_catch_up`). A server that is silent for `lease_s`, or refuses a connection, is `lost`: its requests
fail with `BackendError` at once and their rollouts go back to the ledger. It returns by reporting.

A publication is prepared on every live server while it goes on generating, then recorded, then
committed; a server that fails is fenced and caught up later. Publications are serial (`_publishing`).
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
from pydantic import BaseModel

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import (
    BackendError,
    Draining,
    QueueFull,
    ServiceError,
    StaleVersion,
    SyncError,
)
from headway.contracts.http import (
    WEIGHTS_ABORT,
    WEIGHTS_COMMIT,
    WEIGHTS_PREPARE,
    ServerReport,
    ServerReportResponse,
    ServerState,
    ServerStatus,
    WeightAbortRequest,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, WeightUpdateMeta
from headway.rollout.executor import Signal
from headway.rollout.routing import Router, load_of
from headway.runtime.secret import authorization
from headway.runtime.server_calls import error_of, post_generate

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
CLIENT_KEEP_ALIVE_S = 30.0
FORGET_LOST_S = 600.0
JITTER = 0.25
"""Share by which the wait for a full server varies."""
RID_CHARS = 119
"""Of a request's id, so that a suffix fits."""
LEAVING: frozenset[ServerState] = frozenset({"draining", "lost"})

RecordCommit = Callable[[WeightUpdateMeta], Awaitable[None]]


@dataclass
class _Server:
    report: ServerReport
    state: ServerState
    last_seen: float
    busy_until: float = 0.0
    """It has no room before this moment (monotonic clock)."""
    outstanding_tokens: int = 0
    requests: set[asyncio.Task[LLMResponse]] = field(default_factory=set)
    catching_up: asyncio.Task[None] | None = None


class Fleet:
    """`Generator` over the servers that reported themselves."""

    def __init__(
        self,
        config: FleetConfig,
        committed: WeightUpdateMeta | None,
        record_commit: RecordCommit,
        token: str | None = None,
    ) -> None:
        self._config = config
        self._committed = committed
        self._record_commit = record_commit
        self._servers: dict[str, _Server] = {}
        self._token = token
        self._arrival = Signal()
        self._router = Router()
        self._forgotten_tokens = 0
        self._publishing = asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None
        self._watch: asyncio.Task[None] | None = None
        self._updates_in_flight = 0

    async def start(self) -> None:
        """Open connections and begin to watch leases."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=MAX_CONNECTIONS, keepalive_timeout=CLIENT_KEEP_ALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5.0),
            headers=authorization(self._token),
        )
        self._watch = asyncio.create_task(self._watch_leases(), name="watch leases")

    async def aclose(self) -> None:
        """Close connections; requests in flight fail."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        for server in self._servers.values():
            self._lose(server, "the gateway is shutting down")
        if self._session is not None:
            await self._session.close()

    @property
    def version(self) -> PolicyVersion:
        """Committed version of the fleet."""
        return self._committed.version if self._committed else 0

    @property
    def updates_in_flight(self) -> int:
        """Committed updates during which at least one sequence was being generated."""
        return self._updates_in_flight

    @property
    def generated_tokens(self) -> int:
        """Tokens that were reported, also by servers that are gone."""
        known = sum(server.report.generated_tokens for server in self._servers.values())
        return known + self._forgotten_tokens

    def statuses(self) -> list[ServerStatus]:
        """Every server that was seen lately."""
        return [
            ServerStatus(**server.report.model_dump(), state=server.state)
            for server in self._servers.values()
        ]

    async def report(self, report: ServerReport) -> ServerReportResponse:
        """Registration or heartbeat."""
        server = self._servers.get(report.server_id)
        if server is None or server.state == "lost":
            log.info("server joins", extra={"server": report.server_id, "version": report.version})
            server = _Server(report, "joining", time.monotonic())
            self._servers[report.server_id] = server
        server.report = report
        server.last_seen = time.monotonic()
        if report.draining:
            self._drain(server)
        if server.state in ("joining", "fenced") and not self._publishing.locked():
            await self._admit(server)
        return ServerReportResponse(state=server.state, version=self.version)

    async def agenerate(self, req: LLMRequest) -> LLMResponse:
        # An id of its own each time: a server may not have noticed yet that a request sent before
        # was given up.
        sent = req.model_copy(update={"rid": f"{req.rid[:RID_CHARS]}.{uuid.uuid4().hex[:8]}"})
        deadline = time.monotonic() + self._config.server_wait_s
        while True:
            server = await self._choose(req, deadline)
            try:
                with _outstanding(server, req):
                    response = await self._ask(server, sent)
            except Draining:
                self._drain(server)
            except BackendError as error:
                # Nothing was sent over a connection that was refused.
                if not isinstance(error.__cause__, aiohttp.ClientConnectorError):
                    raise
            except QueueFull as error:
                wait_s = error.retry_after_s * random.uniform(1.0, 1.0 + JITTER)
                server.busy_until = time.monotonic() + wait_s
            else:
                return response.model_copy(update={"rid": req.rid})

    async def _ask(self, server: _Server, req: LLMRequest) -> LLMResponse:
        task = asyncio.create_task(post_generate(self._http, server.report.url, req))
        server.requests.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if server.state == "lost" and not _is_cancelled():
                raise BackendError(f"server {server.report.server_id} was lost") from None
            task.cancel()
            raise
        except BackendError as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectionError):
                self._lose(server, str(error))
            raise
        finally:
            server.requests.discard(task)

    async def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> PolicyVersion:
        async with self._publishing:
            if self._committed is not None and meta == self._committed:
                return meta.version
            if meta.version <= self.version:
                raise StaleVersion(
                    f"version {meta.version} is not newer than committed {self.version}"
                )
            live = [
                server for server in self._servers.values() if server.state in ("ready", "joining")
            ]
            prepared = await self._prepare_all(live, meta)
            await self._record_commit(meta)
            self._committed = meta
            running = await asyncio.gather(
                *(self._commit(server, meta, policy) for server in prepared)
            )
            self._updates_in_flight += sum(running) > 0
        return meta.version

    async def _prepare_all(self, live: list[_Server], meta: WeightUpdateMeta) -> list[_Server]:
        """Stage on all; raise if every live server refused, fence the minority that did."""
        request = WeightUpdateRequest(version=meta.version, path=meta.path)
        outcomes = await asyncio.gather(
            *(self._post(server, WEIGHTS_PREPARE, request) for server in live),
            return_exceptions=True,
        )
        prepared = [
            server
            for server, out in zip(live, outcomes, strict=True)
            if not isinstance(out, BaseException)
        ]
        refused = [
            (server, out)
            for server, out in zip(live, outcomes, strict=True)
            if isinstance(out, BaseException)
        ]
        if not prepared and any(isinstance(out, SyncError) for _, out in refused):
            abort = WeightAbortRequest(version=meta.version)
            await asyncio.gather(
                *(self._post(server, WEIGHTS_ABORT, abort) for server in live),
                return_exceptions=True,
            )
            raise SyncError(
                f"every server refused version {meta.version}, {self.version} goes on serving: "
                f"{refused[0][1]}"
            )
        for server, out in refused:
            self._fence(server, f"prepare of version {meta.version}: {out}")
        return prepared

    async def _commit(
        self, server: _Server, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> int:
        """Swap one server; sequences that were running there at that moment."""
        request = WeightUpdateRequest(version=meta.version, path=meta.path, policy=policy)
        try:
            answer = await self._post(server, WEIGHTS_COMMIT, request)
        except ServiceError as error:
            self._fence(server, f"commit of version {meta.version}: {error}")
            return 0
        server.report = server.report.model_copy(update={"version": meta.version})
        self._set_ready(server)
        return WeightUpdateResponse.model_validate_json(answer).running

    async def _admit(self, server: _Server) -> None:
        if server.report.version == self.version:
            self._set_ready(server)
        elif self._committed is None:
            self._fence(
                server,
                f"it has version {server.report.version}, but nothing was published through this gateway",
            )
        elif server.catching_up is None or server.catching_up.done():
            server.catching_up = asyncio.create_task(self._catch_up(server), name="catch up")

    async def _catch_up(self, server: _Server) -> None:
        async with self._publishing:
            meta = self._committed
            if meta is None or server.report.version == meta.version:
                return
            request = WeightUpdateRequest(version=meta.version, path=meta.path)
            try:
                await self._post(server, WEIGHTS_PREPARE, request)
            except ServiceError as error:
                self._fence(server, f"catching up to version {meta.version}: {error}")
                return
            await self._commit(server, meta)

    def _set_ready(self, server: _Server) -> None:
        if server.state not in LEAVING:
            server.state = "ready"
            self._arrival.notify()

    def _drain(self, server: _Server) -> None:
        """It takes nothing new; what runs there may end."""
        if server.state not in LEAVING:
            log.info("server drains", extra={"server": server.report.server_id})
            server.state = "draining"

    def _fence(self, server: _Server, reason: str) -> None:
        if server.state not in LEAVING:
            log.warning(
                "server fenced", extra={"server": server.report.server_id, "reason": reason}
            )
            server.state = "fenced"

    def _lose(self, server: _Server, reason: str) -> None:
        if server.state == "lost":
            return
        level = logging.INFO if server.state == "draining" else logging.WARNING
        log.log(level, "server lost", extra={"server": server.report.server_id, "reason": reason})
        server.state = "lost"
        for task in server.requests:
            task.cancel()

    async def _watch_leases(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._config.lease_s / 4)
            if time.monotonic() - before > self._config.lease_s / 2:
                continue  # this process was stopped or starved: heartbeats wait in its own sockets
            for server_id, server in list(self._servers.items()):
                silent_s = time.monotonic() - server.last_seen
                if silent_s > self._config.lease_s:
                    self._lose(server, f"no heartbeat for {silent_s:.1f} s")
                if silent_s > FORGET_LOST_S:
                    self._forgotten_tokens += server.report.generated_tokens
                    del self._servers[server_id]

    async def _choose(self, req: LLMRequest, deadline: float) -> _Server:
        """The ready server with room that the router names."""
        while True:
            arrival, now = self._arrival.event(), time.monotonic()
            ready = [server for server in self._servers.values() if server.state == "ready"]
            free = {s.report.server_id: s for s in ready if s.busy_until <= now}
            if free:
                loads = {name: server.outstanding_tokens for name, server in free.items()}
                return free[self._router.choose(req, loads)]
            if now >= deadline:
                raise BackendError(
                    f"no generation server was ready and had room for {self._config.server_wait_s:g} "
                    f"s; known: { {s.report.server_id: s.state for s in self._servers.values()} }"
                )
            until = min([deadline, *(server.busy_until for server in ready)])
            with suppress(TimeoutError):
                async with asyncio.timeout(until - now):
                    await arrival.wait()

    async def _post(self, server: _Server, path: str, body: BaseModel) -> bytes:
        target = server.report.url + path
        timeout = aiohttp.ClientTimeout(total=self._config.update_timeout_s)
        try:
            async with self._http.post(
                target,
                data=body.model_dump_json().encode(),
                headers={"content-type": "application/json"},
                timeout=timeout,
            ) as answer:
                content = await answer.read()
                if answer.status >= 400:
                    raise error_of(answer.status, content, target)
                return content
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise BackendError(f"{target} failed: {type(error).__name__}: {error}") from error

    @property
    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise BackendError("the fleet is not started")
        return self._session


@contextmanager
def _outstanding(server: _Server, req: LLMRequest) -> Iterator[None]:
    load = load_of(req)
    server.outstanding_tokens += load
    try:
        yield
    finally:
        server.outstanding_tokens -= load


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
