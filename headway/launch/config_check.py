"""Kinds of configuration, and the check of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from headway.launch.experiments import EXPERIMENTS, experiment_model, launch_model
from headway.runtime.config import merge_sources, validate_config

PROCESSES: dict[str, type[BaseModel]] = {
    "run": LaunchConfig,
    "gateway": GatewayConfig,
    "server": ServerConfig,
}
MODELS: dict[str, type[BaseModel]] = {**PROCESSES, **EXPERIMENTS}


def check(file: str, flags: Sequence[str] = ()) -> str:
    """Read a file as what it is meant for.

    Returns:
        What it is.
    Raises:
        ConfigError: every problem, with the nearest right name.
    """
    tree = merge_sources(["--config", file, *flags])
    name = kind_of(tree)
    validate_config(model_of(name, tree), tree)
    return f"{file}: right, as a configuration of `{name}`"


def model_of(name: str, tree: Mapping[str, Any]) -> type[BaseModel]:
    """Return the model that checks a tree of this kind.

    Raises:
        UnknownName: nobody registered the experiment.
    """
    if name == "run":
        return launch_model(tree)
    return PROCESSES[name] if name in PROCESSES else experiment_model(name)


def kind_of(tree: Mapping[str, Any]) -> str:
    """Return the kind of a configuration tree: by its `type` an experiment, else by the sections
    that it has."""
    kind = tree.get("type")
    if kind is not None:
        return str(kind)
    candidates = {**PROCESSES, "grpo": EXPERIMENTS["grpo"]}
    shared = {name: len(tree.keys() & m.model_fields.keys()) for name, m in candidates.items()}
    best = max(shared, key=lambda name: shared[name])
    if shared[best] == 0:
        raise ConfigError(
            f"none of the keys {sorted(map(str, tree))} is a setting of {', '.join(candidates)}"
        )
    return best
