"""`python -m inference_server --config server.yaml`: one generation server."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from headway.runtime.access import Access
from headway.runtime.config import load_config
from headway.runtime.listener import check_exposure, serve
from headway.runtime.logging import configure_logging
from headway.runtime.secret import read_token
from inference_server.app import make_app
from inference_server.engine import make_generator
from inference_server.engine_node import is_later_node, run_node

ANY_HOST = ("0.0.0.0", "::")


def main(argv: Sequence[str]) -> None:
    """Load the model, serve it, and register with the gateway if there is one."""
    config = load_config(ServerConfig, argv)
    configure_logging("inference_server", config.service.log_format)
    if is_later_node(config.backend):
        run_node(config, config.backend)
    if config.gateways and not config.advertise_url and config.service.host in ANY_HOST:
        raise ConfigError(
            f"service.host={config.service.host} cannot be called by the gateway; set advertise_url"
        )
    access = Access.from_config(config.service)
    gateway_token = read_token(config.gateway_token_env)
    check_exposure(config.service)  # before a model is loaded
    generator = make_generator(config)
    app = make_app(config, generator, access, gateway_token)

    async def drain() -> None:
        await app.state.service.executor.stop_claiming()
        await generator.drain(config.service.drain_timeout_s)

    serve(app, config.service, drain)
