"""`headway config NAME`: every setting with its default and meaning."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from pydantic import BaseModel

from headway.contracts.config.experiment import (
    DPOExperiment,
    GRPOExperiment,
    PPOExperiment,
    RWExperiment,
    SFTExperiment,
)
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import describe

MODELS: dict[str, type[BaseModel]] = {
    "run": LaunchConfig,
    "gateway": GatewayConfig,
    "server": ServerConfig,
    "grpo": GRPOExperiment,
    "ppo": PPOExperiment,
    "sft": SFTExperiment,
    "rw": RWExperiment,
    "dpo": DPOExperiment,
}


def main(argv: Sequence[str]) -> None:
    """Print the settings of one kind of process or experiment."""
    if len(argv) != 1 or argv[0] not in MODELS:
        raise ConfigError(f"usage: headway config {{{' | '.join(MODELS)}}}")
    sys.stdout.write("\n".join(describe(MODELS[argv[0]])) + "\n")
