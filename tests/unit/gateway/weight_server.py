"""A generation server that only changes its version, as the contract has it; real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web
from pydantic import BaseModel

from gateway.app.fleet import Fleet
from gateway.ledger.sqlite import SqliteLedger
from gateway.versions.publication_state import PublicationState
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.errors import Fenced, ServiceError, SyncError
from headway.contracts.http.paths import (
    GENERATE,
    WEIGHTS_ABORT,
    WEIGHTS_COMMIT,
    WEIGHTS_PREPARE,
)
from headway.contracts.http.servers import ServerReport
from headway.contracts.http.weights import (
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
    WeightPrepareResponse,
    WeightUpdateResponse,
    is_group,
)
from headway.contracts.types import LLMRequest, LLMResponse

DEADLINE_S = 10.0


class WeightServer:
    """Stages at once and agrees with everybody, unless a test says otherwise."""

    def __init__(self, name: str, version: int = 0, num_ranks: int = 1) -> None:
        self.name = name
        self.version = version
        self.num_ranks = num_ranks
        self.digest = ""
        self.epoch = 0
        self.url = ""
        self.uptime_s = 1.0
        self.running = 0
        self.digests: dict[int, str] = {}
        """What it stages, where that is not `d<version>`."""
        self.refusal: ServiceError | None = None
        """Of every prepare."""
        self.commit_failure: ServiceError | None = None
        """Of the next commit."""
        self.on_prepare: Callable[[WeightPrepareRequest], Awaitable[None]] | None = None
        self.on_commit: Callable[[WeightCommitRequest], Awaitable[None]] | None = None
        self.answers_aborts = True
        self.garbled = ""
        """Path whose orders are answered with nonsense."""
        self.prepares: list[WeightPrepareRequest] = []
        self.commits: list[WeightCommitRequest] = []
        self.aborts: list[WeightAbortRequest] = []
        self.generated: list[LLMRequest] = []
        self.staged: WeightPrepareRequest | None = None
        self._aborted = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_post(WEIGHTS_PREPARE, self._prepare)
        app.router.add_post(WEIGHTS_COMMIT, self._commit)
        app.router.add_post(WEIGHTS_ABORT, self._abort)
        app.router.add_post(GENERATE, self._generate)
        self._runner = web.AppRunner(app, shutdown_timeout=0.05)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = "http://{}:{}".format(*self._runner.addresses[0])

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def report(self, **fields) -> ServerReport:
        known = {
            "server_id": self.name,
            "url": self.url,
            "version": self.version,
            "digest": self.digest,
            "num_ranks": self.num_ranks,
            "uptime_s": self.uptime_s,
        }
        return ServerReport(**known | fields)

    def holds_prepare(self) -> asyncio.Event:
        """Stage nothing until the event is set, or an abort comes."""
        go = asyncio.Event()

        async def hold(order: WeightPrepareRequest) -> None:
            waits = [asyncio.create_task(event.wait()) for event in (go, self._aborted)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            if not go.is_set():
                raise SyncError("aborted")

        self.on_prepare = hold
        return go

    def waits_for_others_in_a_group_of(self, world_size: int) -> None:
        """Who never come; groups of another size are met at once."""
        self.holds_prepare()
        hold = self.on_prepare

        async def meet(order: WeightPrepareRequest) -> None:
            if order.group_rank is not None and order.group_rank.world_size == world_size:
                await hold(order)

        self.on_prepare = meet

    def holds_commit(self) -> asyncio.Event:
        go = asyncio.Event()

        async def hold(order: WeightCommitRequest) -> None:
            await go.wait()

        self.on_commit = hold
        return go

    async def _prepare(self, request: web.Request) -> web.Response:
        order = WeightPrepareRequest.model_validate_json(await request.read())
        self.prepares.append(order)
        return self._garble(request) or await _answer(self._stage(order))

    async def _stage(self, order: WeightPrepareRequest) -> WeightPrepareResponse:
        self._check_epoch(order.epoch)
        self._aborted.clear()
        if self.on_prepare is not None:
            await self.on_prepare(order)
        if self.refusal is not None:
            raise self.refusal
        known = None if self.staged is None else self.staged.version
        if is_group(order.path) and order.group_rank is None and known != order.version:
            raise SyncError(f"{order.path} is a process group, and no rank was given")
        digest = self.digests.get(order.version, f"d{order.version}")
        if order.digest not in (None, digest):
            raise SyncError(f"digest {digest}, wanted {order.digest}")
        self.staged = order
        return WeightPrepareResponse(version=order.version, digest=digest)

    async def _commit(self, request: web.Request) -> web.Response:
        order = WeightCommitRequest.model_validate_json(await request.read())
        self.commits.append(order)
        return self._garble(request) or await _answer(self._swap(order))

    async def _swap(self, order: WeightCommitRequest) -> WeightUpdateResponse:
        self._check_epoch(order.epoch)
        if self.on_commit is not None:
            await self.on_commit(order)
        if self.commit_failure is not None:
            failure, self.commit_failure = self.commit_failure, None
            raise failure
        staged = self.staged
        if staged is None or (staged.epoch, staged.version) != (order.epoch, order.version):
            raise SyncError(f"version {order.version} is not staged")
        self.version = order.version
        self.digest = self.digests.get(order.version, f"d{order.version}")
        return WeightUpdateResponse(version=self.version, running=self.running, digest=self.digest)

    async def _abort(self, request: web.Request) -> web.Response:
        order = WeightAbortRequest.model_validate_json(await request.read())
        self.aborts.append(order)
        self._aborted.set()
        self.staged = None
        if not self.answers_aborts:
            await asyncio.Event().wait()
        return web.Response(status=204)

    async def _generate(self, request: web.Request) -> web.Response:
        req = LLMRequest.model_validate_json(await request.read())
        self.generated.append(req)
        response = LLMResponse(
            rid=req.rid,
            output_tokens=[7],
            output_logprobs=[-1.0],
            version_runs=[(self.version, 0, 1)],
            stop_reason="stop",
            latency_s=0.0,
            ttft_s=0.0,
        )
        return web.Response(text=response.model_dump_json())

    def _garble(self, request: web.Request) -> web.Response | None:
        return web.Response(text="{}") if request.path == self.garbled else None

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Fenced(f"epoch {epoch} is over")
        self.epoch = epoch


async def _answer(work: Awaitable[BaseModel]) -> web.Response:
    try:
        return web.Response(text=(await work).model_dump_json())
    except ServiceError as error:
        return web.Response(status=error.http_status, text=error.to_body().model_dump_json())


class Gateway:
    """A fleet over a ledger, with the servers that reported themselves to it."""

    def __init__(self, fleet: Fleet, state: PublicationState, servers: list[WeightServer]) -> None:
        self.fleet = fleet
        self.state = state
        self.servers = servers

    def states(self) -> dict[str, str]:
        return {status.server_id: status.state for status in self.fleet.statuses()}

    def heartbeat(self) -> None:
        """Every server reports."""
        for server in self.servers:
            self.fleet.report(server.report())

    async def until_ready(self) -> None:
        """Heartbeats until every server serves what is committed."""
        self.heartbeat()
        async with asyncio.timeout(DEADLINE_S):
            while set(self.states().values()) != {"ready"}:
                await asyncio.sleep(0.005)
                self.heartbeat()


@asynccontextmanager
async def opened_gateway(
    *servers: WeightServer, ledger: SqliteLedger | None = None, **settings
) -> AsyncIterator[Gateway]:
    """A gateway to which these servers have reported; they are started if they are not."""
    own = SqliteLedger(":memory:")
    if ledger is None:
        await own.open("gateway", 30.0)
    state = PublicationState(ledger or own)
    await state.open()
    fleet = Fleet(FleetConfig(**settings), state)
    await fleet.start()
    started = [server for server in servers if not server.url]
    for server in started:
        await server.start()
    gateway = Gateway(fleet, state, list(servers))
    gateway.heartbeat()
    try:
        yield gateway
    finally:
        await fleet.aclose()
        for server in started:
            await server.stop()
        if ledger is None:
            await own.close()
        await asyncio.sleep(0)  # closed transports are freed one turn later
