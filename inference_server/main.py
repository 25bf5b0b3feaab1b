"""`python -m inference_server --config server.yaml`: one generation server."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI

from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from headway.rollout.app import create_app
from headway.rollout.service import RolloutService
from headway.runtime.config import load_config
from headway.runtime.http_service import serve
from headway.runtime.logging import configure_logging
from inference_server.backends.base import GenerationBackend
from inference_server.engine import LocalGenerator, make_generator, open_service
from inference_server.registration import keep_registered
from inference_server.routes import generation, weights

log = logging.getLogger(__name__)

WATCH_S = 1.0
ANY_HOST = ("0.0.0.0", "::")


def main(argv: Sequence[str]) -> None:
    """Load the model, serve it, and register with the gateway if there is one."""
    config = load_config(ServerConfig, argv)
    configure_logging("inference_server")
    if config.gateway and not config.advertise_url and config.service.host in ANY_HOST:
        raise ConfigError(
            f"service.host={config.service.host} cannot be called by the gateway; set advertise_url"
        )
    serve(make_app(config, make_generator(config)), config.service)


def make_app(config: ServerConfig, generator: LocalGenerator) -> FastAPI:
    """The app of one server."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[RolloutService]:
        async with open_service(config, generator) as service:
            tasks = [
                asyncio.create_task(_register(app, config, generator), name="heartbeat"),
                asyncio.create_task(_end_with(generator.backend), name="watch backend"),
            ]
            try:
                yield service
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    app = create_app(
        "Headway generation server",
        opened,
        config.service.max_body_bytes,
        generation.router,
        weights.router,
    )
    return app


async def _end_with(backend: GenerationBackend) -> None:
    """End this process once its backend is dead: a supervisor starts a new one, a dead one only fails."""
    while backend.failure is None:  # noqa: ASYNC110 - the engine thread cannot set an event of this loop
        await asyncio.sleep(WATCH_S)
    log.error("the backend died; this server ends", extra={"reason": backend.failure})
    signal.raise_signal(signal.SIGTERM)


async def _register(app: FastAPI, config: ServerConfig, generator: LocalGenerator) -> None:
    if config.gateway is not None:
        url = config.advertise_url or app.state.url
        await keep_registered(generator, config.gateway, url, config.heartbeat_s)
