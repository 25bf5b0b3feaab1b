"""Adapters that a server holds beside its base."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from headway.contracts.config.base import Config, Identifier
from headway.contracts.http.weights import WeightPath
from headway.contracts.types import PolicyVersion


class AdapterRequest(Config):
    """`PUT /v1/adapters/{name}`: serve an adapter, or another version of it."""

    path: WeightPath
    """Directory that `peft` wrote (`adapter_config.json` and `adapter_model.safetensors`)."""
    version: PolicyVersion | None = Field(None, ge=0)
    """Its version; None takes the next one."""


class AdapterView(Config):
    """An adapter that is served."""

    name: Identifier
    version: PolicyVersion


def adapter_views(versions: Mapping[str, PolicyVersion]) -> tuple[AdapterView, ...]:
    """Return adapters as they are reported."""
    return tuple(AdapterView(name=name, version=version) for name, version in versions.items())


class AdaptersView(Config):
    """`GET /v1/adapters`."""

    adapters: tuple[AdapterView, ...]
