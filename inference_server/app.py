"""The app of a generation server, which is a gateway of one: a rollout service over one backend.

Only this file of the server knows the gateway's code.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from gateway.ledger.sqlite import SqliteLedger
from gateway.service.app import create_app
from gateway.service.in_process import InProcessEngine
from gateway.service.service import RolloutService
from headway.contracts.config.server import ServerConfig
from headway.dialects import adapter_routes
from headway.dialects.openai import routes as openai
from headway.dialects.request_ids import RequestIds
from headway.dialects.sglang import routes as sglang
from headway.dialects.sglang.dialect import SGLangDialect
from headway.dialects.vllm import routes as vllm
from headway.runtime.access import Access
from headway.runtime.allowed_hosts import AllowedHosts
from headway.runtime.tasks import cancel_and_wait
from inference_server.backends.base import GenerationBackend
from inference_server.dialects import vllm as vllm_weights
from inference_server.dialects.headway import generation, peer_files, weights
from inference_server.dialects.sglang import routes as sglang_weights
from inference_server.dialects.sglang import update_relay
from inference_server.dialects.sglang.update_relay import UpdateRelay
from inference_server.dialects.sglang.weight_groups import WeightGroups
from inference_server.dialects.sglang.weight_updates import SGLangWeightUpdates
from inference_server.engine import LocalGenerator, make_generator
from inference_server.peer_store import PeerStore
from inference_server.registration import keep_registered

log = logging.getLogger(__name__)

WATCH_S = 1.0


def make_app(
    config: ServerConfig,
    generator: LocalGenerator,
    access: Access | None = None,
    gateway_token: str | None = None,
) -> FastAPI:
    """The app of one server.

    Args:
        access: the tokens and their rights; None requires no token.
        gateway_token: what this server carries to its gateway.
    """

    @asynccontextmanager
    async def opened() -> AsyncIterator[RolloutService]:
        async with open_service(config, generator) as service:
            # Now, not before: an attached engine brings its own version.
            closing = _open_dialects(app, config, generator)
            heartbeat = _register(app, config, generator, gateway_token)
            tasks = [
                asyncio.create_task(heartbeat, name="heartbeat"),
                asyncio.create_task(_end_with(generator.backend), name="watch backend"),
            ]
            try:
                yield service
            finally:
                await cancel_and_wait(tasks)
                for each in closing:
                    await each.aclose()

    app = create_app(
        "Headway generation server",
        opened,
        config.service.max_body_bytes,
        generation.router,
        weights.router,
        update_relay.router,
        *adapter_routes.ROUTERS,
        peer_files.router,
        openai.router,
        sglang.router,
        sglang_weights.router,
        vllm.router,
        vllm_weights.router,
        access=access,
        hosts=AllowedHosts(config.service.allowed_hosts, [config.advertise_url]),
        metrics=generator.metrics.registry,
        about=lambda url: {"backend": config.backend.type, "model": config.model.path},
    )
    app.state.served_model = generator
    app.state.adapter_host = generator.adapters
    app.state.peer_store = PeerStore(generator.gate.receiver.held if config.weights.peers else None)
    return app


def _open_dialects(
    app: FastAPI, config: ServerConfig, generator: LocalGenerator
) -> tuple[WeightGroups, WeightGroups]:
    """Give the app what the routes of other APIs work on; what is returned is to be closed."""
    backend, gate, limit_s = generator.backend, generator.gate, config.group_timeout_s
    updates = app.state.sglang_updates = SGLangWeightUpdates(backend, gate, config.weights, limit_s)
    relayed = app.state.update_relay = UpdateRelay(backend, gate, limit_s, config.weights.peers)
    ids = app.state.request_ids = RequestIds(generator)
    model = config.model
    app.state.sglang = SGLangDialect(
        generator, ids, updates.labels.label, model.path, config.served_model_name, model.dtype
    )
    return updates.groups.joined, relayed.groups.joined


async def _end_with(backend: GenerationBackend) -> None:
    """End this process once its backend is dead: a supervisor starts a new one, a dead one only fails."""
    while backend.failure is None:  # noqa: ASYNC110 - the engine thread cannot set an event of this loop
        await asyncio.sleep(WATCH_S)
    log.error("the backend died; this server ends", extra={"reason": backend.failure})
    signal.raise_signal(signal.SIGTERM)


async def _register(
    app: FastAPI, config: ServerConfig, generator: LocalGenerator, token: str | None
) -> None:
    if config.gateways:
        url = config.advertise_url or app.state.url
        await keep_registered(generator, config.gateways, url, config.heartbeat_s, token)


@asynccontextmanager
async def open_service(
    config: ServerConfig, generator: LocalGenerator
) -> AsyncIterator[RolloutService]:
    """A rollout service over one backend, with a ledger in memory."""
    ledger = SqliteLedger(":memory:")
    await ledger.open(config.model.path, config.executor.lease_s)
    service = RolloutService(generator, ledger, generator.tokenizer, config.executor)
    try:
        await generator.backend.start()
        await service.start()
        yield service
    finally:
        await service.aclose()
        await generator.aclose()
        await ledger.close()


class LocalInferenceEngine(InProcessEngine):
    """`InferenceEngine` in this process: one backend, executor, ledger and version gate."""

    def __init__(self, config: ServerConfig) -> None:
        super().__init__(lambda: open_service(config, make_generator(config)))
