"""`headway serve` and `python -m inference_server`: help and arguments."""

from __future__ import annotations

import click

from headway.runtime.settings import settings_of
from headway.runtime.settings_command import SettingsCommand


class ServeCommand(SettingsCommand):
    """Refuses wrong settings before torch is loaded, which takes seconds."""

    def invoke(self, ctx: click.Context) -> None:
        """Check, and hand over."""
        from headway.contracts.config.server import ServerConfig  # pydantic: not for help
        from headway.runtime.config import load_config

        load_config(ServerConfig, ctx.args)
        super().invoke(ctx)


command = ServeCommand(
    "serve",
    "inference_server.main",
    lambda argv: settings_of("server"),
    "Serve one model: generation over HTTP, alone or registered with a gateway.",
    "headway serve --model.path MODEL_DIR\n"
    "headway serve --config server.yaml --gateway http://127.0.0.1:8000 --service.port 8001\n"
    "python -m inference_server --model.path MODEL_DIR --backend.type fake",
)
