"""Workflows, rewards, filters and tools that a request may name, with their schemas."""

from __future__ import annotations

from typing import Any

from headway.contracts.config.base import Config


class ComponentView(Config):
    """A registered workflow, reward, filter or tool."""

    name: str
    version: str | None
    summary: str
    """First line of its documentation."""
    args_schema: dict[str, Any]
    """JSON schema of its arguments."""


class ComponentList(Config):
    """`GET /v1/workflows`, `/v1/rewards`, `/v1/filters`, `/v1/tools`."""

    parts: list[ComponentView]
