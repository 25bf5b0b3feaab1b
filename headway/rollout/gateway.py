"""The gateway: one URL for rollouts, in front of a fleet of generation servers. No torch here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial

from fastapi import APIRouter, Request

from headway.contracts import http
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.types import WeightUpdateMeta
from headway.rollout.app import create_app
from headway.rollout.fleet import Fleet
from headway.rollout.ledger.base import Ledger
from headway.rollout.ledger.sqlite import SqliteLedger
from headway.rollout.service import RolloutService
from headway.rollout.tokenizer import TextTokenizer
from headway.runtime.config import load_config
from headway.runtime.http_service import serve
from headway.runtime.logging import configure_logging
from headway.runtime.secret import read_token

COMMITTED_NOTE = "committed_weights"

fleet_routes = APIRouter()


@fleet_routes.post(http.SERVERS)
async def report_server(body: http.ServerReport, request: Request) -> http.ServerReportResponse:
    fleet: Fleet = request.app.state.service.generator
    return await fleet.report(body)


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig, fleet_token: str | None = None
) -> AsyncIterator[RolloutService]:
    """Open the ledger, restore the committed version, and play rollouts against the fleet."""
    tokenizer = TextTokenizer(config.tokenizer)
    ledger = SqliteLedger(config.ledger)
    await ledger.open()
    committed = await _committed(ledger)
    record = partial(_record_commit, ledger)
    fleet = Fleet(config.fleet, committed, record, fleet_token)
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
    app = create_app(
        "Headway gateway",
        lambda: open_gateway(config, fleet_token),
        config.service.max_body_bytes,
        fleet_routes,
        token=read_token(config.service.token_env),
    )
    serve(app, config.service)


async def _committed(ledger: Ledger) -> WeightUpdateMeta | None:
    note = await ledger.get_note(COMMITTED_NOTE)
    return None if note is None else WeightUpdateMeta(**json.loads(note))


async def _record_commit(ledger: Ledger, meta: WeightUpdateMeta) -> None:
    await ledger.put_note(COMMITTED_NOTE, json.dumps(asdict(meta)))
