"""Whether settings that a page shows exist, with values that are allowed; parts of files are enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.server import ServerConfig
from headway.contracts.errors import ConfigError
from headway.runtime.config import validate_config
from trainer.experiments.base import EXPERIMENTS

FOREIGN_KEYS = {"apiVersion", "services", "scrape_configs", "groups"}
"""Kubernetes manifests, Compose files, Prometheus: only their syntax is ours to check."""
NOT_ALL_SAID = {"missing", "union_tag_not_found"}
"""What pydantic says of a part of a file."""


def models() -> Iterator[type[BaseModel]]:
    """What a process can be configured by."""
    yield from (GatewayConfig, ServerConfig, LaunchConfig)
    for name in EXPERIMENTS.names():
        yield EXPERIMENTS.get(name).config


def is_foreign(tree: Mapping[str, Any]) -> bool:
    """Whether another program reads it."""
    return bool(FOREIGN_KEYS & tree.keys())


def check_settings(tree: Mapping[str, Any]) -> None:
    """Raise unless a process takes the tree, or several share it, or it is what stands in one section."""
    if not all(problems_of(model, tree) for model in models()):
        return
    known = {name for model in models() for name in model.model_fields}
    if not tree.keys() <= known:
        wholes = ((model, {name: tree}) for model in models() for name in model.model_fields)
        if any(not problems_of(model, whole) for model, whole in wholes):
            return
    for key, value in tree.items():
        check_section({key: value} | {"type": tree["type"]} if "type" in tree else {key: value})


def check_section(tree: Mapping[str, Any]) -> None:
    """Raise unless a process takes it."""
    found = [problems_of(model, tree) for model in models()]
    assert not all(found), f"no process takes {dict(tree)}: {min(found, key=len)}"


def problems_of(model: type[BaseModel], tree: Mapping[str, Any]) -> list[str]:
    """What this process refuses in it; that it is not whole does not count."""
    try:
        validate_config(model, tree)
    except ConfigError as error:
        assert isinstance(error.__cause__, ValidationError)
        return [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in error.__cause__.errors()
            if problem["type"] not in NOT_ALL_SAID
        ]
    return []
