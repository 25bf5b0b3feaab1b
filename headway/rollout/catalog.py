"""The registered workflows and rewards, with the JSON schemas of their arguments."""

from __future__ import annotations

from headway.contracts.http import PartView
from headway.rollout.rewards.base import REWARDS, reward_factory, reward_schema
from headway.rollout.workflows.base import WORKFLOWS, get_workflow, workflow_schema


def workflow_views() -> list[PartView]:
    """All workflows, by name."""
    return [
        PartView(
            name=name,
            version=get_workflow(name).version,
            summary=_first_line(get_workflow(name)),
            args_schema=workflow_schema(name),
        )
        for name in WORKFLOWS.names()
    ]


def reward_views() -> list[PartView]:
    """All rewards, by name."""
    return [
        PartView(
            name=name,
            version=None,
            summary=_first_line(reward_factory(name)),
            args_schema=reward_schema(name),
        )
        for name in REWARDS.names()
    ]


def _first_line(part: object) -> str:
    return (part.__doc__ or "").strip().partition("\n")[0]
