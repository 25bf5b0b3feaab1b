"""The gateway: one URL for rollouts, in front of a fleet of generation servers. No torch here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry

from headway.contracts import http
from headway.contracts.config.gateway import GatewayConfig
from headway.rollout.app import create_app
from headway.rollout.fleet import Fleet
from headway.rollout.ledger.sqlite import SqliteLedger
from headway.rollout.service import RolloutService
from headway.rollout.tokenizer import TextTokenizer
from headway.rollout.weight_book import WeightBook
from headway.runtime.config import load_config
from headway.runtime.http_service import serve
from headway.runtime.logging import configure_logging
from headway.runtime.secret import read_token

fleet_routes = APIRouter()


@fleet_routes.post(http.SERVERS)
async def report_server(body: http.ServerReport, request: Request) -> http.ServerReportResponse:
    return _fleet(request).report(body)


@fleet_routes.get(http.WEIGHTS)
async def weights(request: Request) -> http.WeightStatus:
    return _fleet(request).weights()


@fleet_routes.post(http.WEIGHTS_PIN)
async def pin(body: http.WeightPinRequest, request: Request) -> http.WeightStatus:
    return await _fleet(request).pin(body.version)


@fleet_routes.post(http.WEIGHTS_ROLLBACK)
async def rollback(body: http.WeightRollbackRequest, request: Request) -> http.WeightStatus:
    return await _fleet(request).rollback(body.version)


def _fleet(request: Request) -> Fleet:
    fleet: Fleet = request.app.state.service.generator
    return fleet


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig,
    fleet_token: str | None = None,
    metrics: CollectorRegistry | None = None,
) -> AsyncIterator[RolloutService]:
    """Open the ledger, restore what was published, and play rollouts against the fleet."""
    tokenizer = TextTokenizer(config.tokenizer)
    ledger = SqliteLedger(config.ledger)
    await ledger.open()
    book = WeightBook(ledger)
    await book.open()
    fleet = Fleet(config.fleet, book, fleet_token, metrics)
    service = RolloutService(fleet, ledger, tokenizer, config.executor)
    await fleet.start()
    await service.start()
    try:
        yield service
    finally:
        await service.aclose()
        await fleet.aclose()
        await ledger.close()


def main(argv: Sequence[str]) -> None:
    """Run a gateway until SIGTERM or SIGINT."""
    config = load_config(GatewayConfig, argv)
    configure_logging("gateway")
    TextTokenizer(config.tokenizer)  # a wrong directory fails before the port is taken
    fleet_token = read_token(config.fleet.token_env)
    metrics = CollectorRegistry()
    app = create_app(
        "Headway gateway",
        lambda: open_gateway(config, fleet_token, metrics),
        config.service.max_body_bytes,
        fleet_routes,
        token=read_token(config.service.token_env),
        metrics=metrics,
    )
    serve(app, config.service)
