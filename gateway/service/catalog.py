"""The registered workflows, rewards, filters and tools, with the JSON schemas of their arguments."""

from __future__ import annotations

from typing import Any

from gateway.filters.base import FILTERS, filter_schema
from gateway.rewards.base import REWARDS, reward_factory, reward_schema
from gateway.tools.base import TOOLS, tool_schema
from gateway.workflows.base import WORKFLOWS, get_workflow, workflow_schema
from headway.contracts.http.components import ComponentView


def workflow_views() -> list[ComponentView]:
    """All workflows, by name."""
    return [
        _view(name, get_workflow(name), workflow_schema(name), get_workflow(name).version)
        for name in WORKFLOWS.names()
    ]


def reward_views() -> list[ComponentView]:
    """All rewards, by name."""
    return [_view(name, reward_factory(name), reward_schema(name)) for name in REWARDS.names()]


def filter_views() -> list[ComponentView]:
    """All filters, by name."""
    return [_view(name, FILTERS.get(name), filter_schema(name)) for name in FILTERS.names()]


def tool_views() -> list[ComponentView]:
    """All tools, by name."""
    return [_view(name, TOOLS.get(name), tool_schema(name)) for name in TOOLS.names()]


def _view(
    name: str, part: object, args_schema: dict[str, Any], version: str | None = None
) -> ComponentView:
    return ComponentView(
        name=name, version=version, summary=_first_line(part), args_schema=args_schema
    )


def _first_line(part: object) -> str:
    return (part.__doc__ or "").strip().partition("\n")[0]
