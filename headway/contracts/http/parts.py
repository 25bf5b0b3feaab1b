"""What may be named in a request: workflows, rewards, filters and tools, with their schemas."""

from __future__ import annotations

from typing import Any

from headway.contracts.config.base import Config


class PartView(Config):
    """A registered workflow, reward, filter or tool."""

    name: str
    version: str | None
    summary: str
    """First line of its documentation."""
    args_schema: dict[str, Any]
    """JSON schema of its arguments."""


class PartList(Config):
    """`GET /v1/workflows`, `/v1/rewards`, `/v1/filters`, `/v1/tools`."""

    parts: list[PartView]
