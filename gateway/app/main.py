"""The gateway: one URL for rollouts, in front of a fleet of generation servers. No torch here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from gateway.app import foreign_update_routes
from gateway.app.fleet import Fleet
from gateway.app.followed_store import FollowedStore
from gateway.app.foreign_weights import ForeignWeights
from gateway.app.opening import open_gateway
from gateway.app.relayed_updates import RelayedUpdates
from gateway.app.routes import fleet_routes, fleet_view
from gateway.app.served_fleet import ServedFleet
from gateway.dashboard.history import ServiceHistory
from gateway.dashboard.routes import dashboard_routes
from gateway.ledger.on_redis.address import parse_address
from gateway.service.app import create_app
from gateway.service.service import RolloutService
from gateway.sessions.routes import session_routes
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.http import paths
from headway.dialects import adapter_routes
from headway.dialects.openai import routes as openai
from headway.dialects.request_ids import RequestIds
from headway.dialects.sglang import routes as sglang
from headway.dialects.sglang.dialect import SGLangDialect
from headway.dialects.vllm import routes as vllm
from headway.runtime.access import Access
from headway.runtime.allowed_hosts import AllowedHosts
from headway.runtime.config import load_config
from headway.runtime.listener import serve
from headway.runtime.logging import configure_logging
from headway.runtime.secret import read_token
from headway.runtime.tasks import cancel_and_wait
from headway.text.tokenizer import TextTokenizer


def make_gateway(
    config: GatewayConfig, fleet_token: str | None = None, access: Access | None = None
) -> FastAPI:
    """The app of a gateway.

    Args:
        fleet_token: what the servers ask for.
        access: who may call what; None asks for no token.
    """
    metrics, history = CollectorRegistry(), ServiceHistory()

    @asynccontextmanager
    async def open_service() -> AsyncIterator[RolloutService]:
        async with open_gateway(
            config, fleet_token, metrics, lambda: getattr(app.state, "url", None), history
        ) as service:
            weights = _open_dialects(app, config, service)
            if config.follow is None:
                yield service
                return
            followed = FollowedStore(config.follow, weights, service.updates, metrics)
            task = asyncio.create_task(followed.run(), name="follow a store")
            try:
                yield service
            finally:
                await cancel_and_wait([task])

    def about(url: str) -> dict[str, str]:
        ledger = config.ledger
        page = {"dashboard": url + paths.UI} if config.dashboard else {}
        return {**page, "ledger": parse_address(ledger).shown if "://" in ledger else ledger}

    app = create_app(
        "Headway gateway",
        open_service,
        config.service.max_body_bytes,
        fleet_routes,
        session_routes(),
        openai.router,
        sglang.router,
        vllm.router,
        foreign_update_routes.router,
        foreign_update_routes.vllm_router,
        *adapter_routes.ROUTERS,
        *([dashboard_routes(history, fleet_view)] if config.dashboard else []),
        access=access,
        hosts=AllowedHosts(config.service.allowed_hosts, [config.sessions.public_url]),
        metrics=metrics,
        about=about,
    )
    return app


def _open_dialects(app: FastAPI, config: GatewayConfig, service: RolloutService) -> ForeignWeights:
    """Give the app what the routes of other APIs work on."""
    fleet = cast("Fleet", service.generator)
    tokenizer = cast("TextTokenizer", service.tokenizer)
    served = app.state.served_model = ServedFleet(config, fleet, tokenizer)
    app.state.adapter_host = fleet.weights.adapters
    weights = app.state.foreign_weights = ForeignWeights(fleet)
    app.state.relayed_updates = RelayedUpdates(
        fleet, weights, service.updates, config.fleet.update_timeout_s
    )
    ids = app.state.request_ids = RequestIds(served)
    fleet.aborts.end = lambda rid: [served.end(each) for each in ids.sequences(rid)]
    app.state.sglang = SGLangDialect(
        served, ids, weights.label, config.tokenizer, config.served_model_name
    )
    return weights


def main(argv: Sequence[str]) -> None:
    """Run a gateway until SIGTERM or SIGINT."""
    config = load_config(GatewayConfig, argv)
    configure_logging("gateway", config.service.log_format)
    TextTokenizer(config.tokenizer)  # a wrong directory fails before the port is taken
    access = Access.from_config(config.service)
    app = make_gateway(config, read_token(config.fleet.token_env), access)
    serve(app, config.service)
