"""Opens a gateway: the store, what rollouts may use, the fleet and the service, in this order."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Gauge

from gateway.app.fleet import Fleet
from gateway.app.rollout_metrics import RolloutMetrics
from gateway.app.watches import adapt, follow, observe, warm_up
from gateway.components.shared_services import SharedServices
from gateway.dashboard.history import ServiceHistory
from gateway.fleet.concurrency import AdaptiveBound
from gateway.fleet.registry.base import ServerRegistry
from gateway.fleet.registry.make import make_registry
from gateway.ledger.base import Ledger
from gateway.ledger.lock import sole_gateway
from gateway.ledger.make import make_ledger
from gateway.ledger.owner import new_owner
from gateway.sandbox.choice import BackgroundSandbox, make_sandbox
from gateway.service.options import ServiceOptions
from gateway.service.service import RolloutService
from gateway.sessions.session_directory import SessionDirectory
from gateway.sessions.sessions import Sessions
from gateway.versions.publication_state import PublicationState
from headway.contracts.config.gateway import ExecutorConfig, GatewayConfig
from headway.contracts.errors import StateError, StoreUnusable
from headway.runtime.clock import monotonic
from headway.runtime.modules import import_modules
from headway.runtime.outbound import HttpOutbound
from headway.runtime.tasks import cancel_and_wait
from headway.runtime.wait_notice import WaitNotice
from headway.text.tokenizer import TextTokenizer

STORE_WAIT_S = 60.0
"""Seconds to wait for a store that is not there yet: a restart would wait longer."""
STORE_LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class _Store:
    """Stores that outlive this process, opened."""

    ledger: Ledger
    registry: ServerRegistry
    state: PublicationState


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    fleet_token: str | None = None,
    metrics: CollectorRegistry | None = None,
    address: Callable[[], str | None] = lambda: None,
    history: ServiceHistory | None = None,
) -> AsyncIterator[RolloutService]:
    """Open the ledger, restore what was published, and run rollouts on the fleet.

    Args:
        config: the gateway's.
        fleet_token: what the servers ask for.
        metrics: registry of the gateway's metrics.
        address: the URL that this gateway listens on, once it does.
        history: kept for the dashboard.
    """
    import_modules(config.modules)
    metrics = metrics or CollectorRegistry()
    history = history or ServiceHistory()
    tokenizer = TextTokenizer(config.tokenizer, config.executor.max_prompt_bytes)
    url = address()
    place = f"{socket.gethostname()}:{url}" if url else ""
    async with AsyncExitStack() as stack:
        store = await _open_store(stack, config, place)
        services = await _open_services(stack, config)
        sessions = _make_sessions(config, store.ledger, url, metrics)
        fleet = Fleet(
            config.fleet,
            store.state,
            fleet_token,
            metrics,
            store.registry,
            place,
            tokenizer.vocabulary,
            tokenizer.end_ids,
        )
        bound = _make_bound(config.executor, metrics)
        around = ServiceOptions(
            services,
            sessions,
            lambda: bound.limit,
            config.retention,
            observers=(RolloutMetrics(metrics), history),
            metrics=metrics,
        )
        service = RolloutService(fleet, store.ledger, tokenizer, config.executor, around)
        stack.push_async_callback(fleet.aclose)
        await fleet.start()
        stack.push_async_callback(service.aclose)
        await _until_there(service.start)
        watches = [
            follow(store.state, service),
            observe(fleet, service, history),
            warm_up(service),
            *([adapt(bound, fleet, service)] if config.executor.adapt else []),
        ]
        tasks = [asyncio.create_task(watch) for watch in watches]
        stack.push_async_callback(cancel_and_wait, tasks)
        yield service


async def _open_store(stack: AsyncExitStack, config: GatewayConfig, place: str) -> _Store:
    stack.enter_context(sole_gateway(config.ledger))
    ledger = make_ledger(config.ledger)
    stack.push_async_callback(ledger.close)
    await _until_there(lambda: ledger.open(new_owner(place), config.executor.lease_s))
    registry = make_registry(config.ledger)
    stack.push_async_callback(registry.close)
    await _until_there(registry.open)
    state = PublicationState(ledger)
    await _until_there(state.open)
    return _Store(ledger, registry, state)


async def _open_services(stack: AsyncExitStack, config: GatewayConfig) -> SharedServices:
    outbound = HttpOutbound(config.outbound)
    stack.push_async_callback(outbound.aclose)
    sandbox = make_sandbox(config.sandbox, outbound)
    if config.sandbox.type == "auto":
        sandbox = BackgroundSandbox(sandbox)
    stack.push_async_callback(sandbox.aclose)
    await sandbox.start()
    return SharedServices(sandbox, outbound)


def _make_sessions(
    config: GatewayConfig, ledger: Ledger, url: str | None, metrics: CollectorRegistry
) -> Sessions:
    board = SessionDirectory(ledger) if ledger.is_shared else None
    sessions = Sessions(config.sessions, config.executor.rollout_timeout_s, board)
    sessions.address = url
    Gauge(
        "headway_session_open_sessions", "Sessions that are open here", registry=metrics
    ).set_function(lambda: sessions.num_open)
    return sessions


def _make_bound(config: ExecutorConfig, metrics: CollectorRegistry) -> AdaptiveBound:
    bound = AdaptiveBound(config.max_concurrent, config.min_concurrent)
    Gauge(
        "headway_fleet_limit_trajectories",
        "Trajectories that this gateway may run at once",
        registry=metrics,
    ).set_function(lambda: bound.limit)
    return bound


async def _until_there(work: Callable[[], Awaitable[None]]) -> None:
    """Do it as soon as the store that it needs answers.

    Raises:
        StoreUnusable: at once.
        StateError: it did not answer for `STORE_WAIT_S`.
    """
    deadline = monotonic() + STORE_WAIT_S
    notice = WaitNotice("the store", first_s=0.0)
    while True:
        try:
            return await work()
        except StoreUnusable:
            raise
        except StateError as error:
            if monotonic() > deadline:
                raise
            notice.log_if_due(str(error))
        await asyncio.sleep(STORE_LOOK_S)
