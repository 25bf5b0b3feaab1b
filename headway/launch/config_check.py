"""What can be configured, and whether a file does it right."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

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
from headway.contracts.config.ppo_code import PPOCodeExperiment, PPOMathExperiment
from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import merge_sources, validate_config

EXPERIMENTS: dict[str, type[BaseModel]] = {
    "grpo": GRPOExperiment,
    "ppo": PPOExperiment,
    "ppo-code": PPOCodeExperiment,
    "ppo-math": PPOMathExperiment,
    "sft": SFTExperiment,
    "rw": RWExperiment,
    "dpo": DPOExperiment,
}
MODELS: dict[str, type[BaseModel]] = {
    "run": LaunchConfig,
    "gateway": GatewayConfig,
    "server": ServerConfig,
    **EXPERIMENTS,
}


def check(file: str, flags: Sequence[str] = ()) -> str:
    """Read a file as what it is meant for.

    Returns:
        What it is.
    Raises:
        ConfigError: every problem, with the nearest right name.
    """
    tree = merge_sources(["--config", file, *flags])
    name = kind_of(tree)
    validate_config(MODELS[name], tree)
    return f"{file}: right, as a configuration of `{name}`"


def kind_of(tree: Mapping[str, Any]) -> str:
    """Which of `MODELS` a tree is meant for: by its `type`, else by the sections that it has."""
    kind = tree.get("type")
    if kind is not None:
        if kind not in EXPERIMENTS:
            near = difflib.get_close_matches(str(kind), EXPERIMENTS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(EXPERIMENTS)}"
            raise ConfigError(f"type: no experiment named {kind!r}; {hint}")
        return str(kind)
    candidates = {
        name: m for name, m in MODELS.items() if name not in EXPERIMENTS or name == "grpo"
    }
    shared = {name: len(tree.keys() & m.model_fields.keys()) for name, m in candidates.items()}
    best = max(shared, key=lambda name: shared[name])
    if shared[best] == 0:
        raise ConfigError(
            f"none of the keys {sorted(map(str, tree))} is a setting of {', '.join(candidates)}"
        )
    return best
