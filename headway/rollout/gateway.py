"""The gateway: one URL for rollouts, in front of a fleet of generation servers. No torch here."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

from fastapi import APIRouter, FastAPI, Request
from prometheus_client import CollectorRegistry, Gauge

from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.errors import RewardOutage, StateError
from headway.contracts.http import paths
from headway.contracts.http.servers import (
    DrainRequest,
    ScaleResponse,
    ServerReport,
    ServerReportResponse,
    ServerStatus,
)
from headway.contracts.http.weights import (
    ReservationEndRequest,
    ReservationStatus,
    WeightPinRequest,
    WeightReservation,
    WeightRollbackRequest,
    WeightStatus,
)
from headway.rollout.app import create_app
from headway.rollout.dashboard.history import INTERVAL_S, History
from headway.rollout.dashboard.routes import dashboard_routes
from headway.rollout.facilities import Facilities
from headway.rollout.fleet.concurrency import AdaptiveBound
from headway.rollout.fleet.fleet import Fleet
from headway.rollout.fleet.registry.make import make_registry
from headway.rollout.fleet.scale import headroom_of
from headway.rollout.ledger.lock import sole_gateway
from headway.rollout.ledger.make import make_ledger
from headway.rollout.ledger.owner import new_owner
from headway.rollout.publishing.book import WeightBook
from headway.rollout.rollout_metrics import RolloutMetrics
from headway.rollout.routes import service_of
from headway.rollout.sandbox.choice import SandboxInTime, make_sandbox
from headway.rollout.service import RolloutService, Surroundings
from headway.rollout.sessions.board import Board
from headway.rollout.sessions.routes import session_routes
from headway.rollout.sessions.sessions import Sessions
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.watched_ledger import watched
from headway.runtime.access import Access
from headway.runtime.config import load_config
from headway.runtime.json_route import JsonRoute
from headway.runtime.listener import serve
from headway.runtime.logging import configure_logging
from headway.runtime.modules import import_modules
from headway.runtime.outbound import HttpOutbound
from headway.runtime.secret import read_token

log = logging.getLogger(__name__)

OBSERVE_S = 1.0
"""Between looks at the servers' caches."""
STORE_WAIT_S = 60.0
"""For a store that is not there yet: whoever starts this process again would wait for longer."""
STORE_LOOK_S = 0.1

fleet_routes = APIRouter(route_class=JsonRoute)


@fleet_routes.post(paths.SERVERS)
async def report_server(body: ServerReport, request: Request) -> ServerReportResponse:
    return _fleet(request).report(body)


@fleet_routes.post(paths.SERVERS_DRAIN)
async def drain_server(body: DrainRequest, request: Request) -> ServerStatus:
    return await _fleet(request).drain(body.server_id, body.drain)


@fleet_routes.get(paths.SCALE)
async def scale(request: Request) -> ScaleResponse:
    service = service_of(request)
    status = await service.status()
    return _fleet(request).scale(status.counts, headroom_of(status))


@fleet_routes.get(paths.WEIGHTS)
async def weights(request: Request) -> WeightStatus:
    return _fleet(request).weights()


@fleet_routes.post(paths.WEIGHTS_PIN)
async def pin(body: WeightPinRequest, request: Request) -> WeightStatus:
    return await _fleet(request).pin(body.version)


@fleet_routes.post(paths.WEIGHTS_ROLLBACK)
async def rollback(body: WeightRollbackRequest, request: Request) -> WeightStatus:
    return await _fleet(request).rollback(body.version)


@fleet_routes.post(paths.WEIGHTS_RESERVATION)
async def reserve(body: WeightReservation, request: Request) -> ReservationStatus:
    return await _fleet(request).reserve(body)


@fleet_routes.delete(paths.WEIGHTS_RESERVATION, status_code=204)
async def end_reservation(body: ReservationEndRequest, request: Request) -> None:
    await _fleet(request).end_reservation(body.name)


def _fleet(request: Request) -> Fleet:
    fleet: Fleet = request.app.state.service.generator
    return fleet


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    fleet_token: str | None = None,
    metrics: CollectorRegistry | None = None,
    address: Callable[[], str | None] = lambda: None,
    history: History | None = None,
) -> AsyncIterator[RolloutService]:
    """Open the ledger, restore what was published, and play rollouts against the fleet.

    Args:
        config: the gateway's.
        fleet_token: what the servers ask for.
        metrics: where figures are shown.
        address: the URL that this gateway listens on, once it does.
        history: kept for the dashboard.
    """
    import_modules(config.modules)
    metrics = metrics or CollectorRegistry()
    history = history or History()
    tokenizer = TextTokenizer(config.tokenizer)
    url = address()
    place = f"{socket.gethostname()}:{url}" if url else ""
    async with AsyncExitStack() as stack:
        stack.enter_context(sole_gateway(config.ledger))
        ledger = watched(make_ledger(config.ledger), [RolloutMetrics(metrics), history])
        stack.push_async_callback(ledger.close)
        await _until_there(lambda: ledger.open(new_owner(place), config.executor.lease_s))
        registry = make_registry(config.ledger)
        stack.push_async_callback(registry.close)
        await _until_there(registry.open)
        book = WeightBook(ledger)
        await _until_there(book.open)
        outbound = HttpOutbound(config.outbound)
        stack.push_async_callback(outbound.aclose)
        sandbox = make_sandbox(config.sandbox, outbound)
        if config.sandbox.type == "auto":
            sandbox = SandboxInTime(sandbox)
        stack.push_async_callback(sandbox.aclose)
        await sandbox.start()
        board = Board(ledger) if ledger.is_shared else None
        sessions = Sessions(config.sessions, config.executor.rollout_timeout_s, board)
        sessions.address = url
        Gauge(
            "headway_session_open_sessions", "Sessions that are open here", registry=metrics
        ).set_function(lambda: sessions.num_open)
        fleet = Fleet(config.fleet, book, fleet_token, metrics, registry, place)
        bound = AdaptiveBound(config.executor.max_concurrent, config.executor.min_concurrent)
        Gauge(
            "headway_fleet_limit_trajectories",
            "Trajectories that this gateway may have in play",
            registry=metrics,
        ).set_function(lambda: bound.limit)
        around = Surroundings(
            Facilities(sandbox, outbound),
            sessions,
            lambda: bound.limit,
            config.retention,
            metrics=metrics,
        )
        service = RolloutService(fleet, ledger, tokenizer, config.executor, around)
        stack.push_async_callback(fleet.aclose)
        await fleet.start()
        stack.push_async_callback(service.aclose)
        await _until_there(service.start)
        watches = [_follow(fleet, service), _observe(fleet, service, history), _warm_up(service)]
        if config.executor.adapt:
            watches.append(_adapt(bound, fleet, service))
        stack.push_async_callback(_end, [asyncio.ensure_future(watch) for watch in watches])
        yield service


async def _until_there(work: Callable[[], Awaitable[None]]) -> None:
    """Do it as soon as the store that it needs answers.

    Raises:
        StateError: it did not answer for `STORE_WAIT_S`.
    """
    deadline = time.monotonic() + STORE_WAIT_S
    is_told = False
    while True:
        try:
            return await work()
        except StateError as error:
            if time.monotonic() > deadline:
                raise
            if not is_told:
                log.warning("waiting for the store", extra={"reason": str(error)})
                is_told = True
        await asyncio.sleep(STORE_LOOK_S)


async def _warm_up(service: RolloutService) -> None:
    try:
        await service.warm_up()
    except RewardOutage as error:
        log.warning("the first verifier will be tried again", extra={"reason": str(error)})


async def _follow(fleet: Fleet, service: RolloutService) -> None:
    """A version that another gateway committed admits as one of this gateway does."""
    while True:
        await fleet.turned.event().wait()
        service.notify()


async def _observe(fleet: Fleet, service: RolloutService, history: History) -> None:
    """Figures that are means over time, and the dashboard's curves."""
    while True:
        try:
            status = await service.status()
            fleet.scale(status.counts, headroom_of(status))
            history.note(time.time(), status)
        except StateError as error:
            log.warning("the ledger does not answer", extra={"reason": str(error)})
        await asyncio.sleep(INTERVAL_S)


async def _adapt(bound: AdaptiveBound, fleet: Fleet, service: RolloutService) -> None:
    """Fewer rollouts in play while servers run out of cache."""
    while True:
        before = bound.limit
        if bound.observe(fleet.statuses()) > before:
            service.notify()
        await asyncio.sleep(OBSERVE_S)


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def make_gateway(
    config: GatewayConfig, fleet_token: str | None = None, access: Access | None = None
) -> FastAPI:
    """The app of a gateway.

    Args:
        fleet_token: what the servers ask for.
        access: who may call what; None asks for no token.
    """
    metrics, history = CollectorRegistry(), History()

    def open_service() -> AbstractAsyncContextManager[RolloutService]:
        return open_gateway(
            config, fleet_token, metrics, lambda: getattr(app.state, "url", None), history
        )

    app = create_app(
        "Headway gateway",
        open_service,
        config.service.max_body_bytes,
        fleet_routes,
        session_routes(),
        *([dashboard_routes(history)] if config.dashboard else []),
        access=access,
        metrics=metrics,
    )
    return app


def main(argv: Sequence[str]) -> None:
    """Run a gateway until SIGTERM or SIGINT."""
    config = load_config(GatewayConfig, argv)
    configure_logging("gateway")
    TextTokenizer(config.tokenizer)  # a wrong directory fails before the port is taken
    access = Access.from_config(config.service)
    app = make_gateway(config, read_token(config.fleet.token_env), access)
    serve(app, config.service)
