"""`headway gateway`: its help and arguments."""

from __future__ import annotations

from headway.runtime.settings import settings_of
from headway.runtime.settings_command import SettingsCommand

command = SettingsCommand(
    "gateway",
    "gateway.app.main",
    lambda argv: settings_of("gateway"),
    "Serve one gateway: rollouts over HTTP, in front of generation servers that register with it.",
    "headway gateway --config gateway.yaml --service.port 8000\n"
    "headway gateway --tokenizer MODEL_DIR --ledger ledger.sqlite",
)
