"""Filters by name: which finished groups are worth training on.

A group that a filter drops is counted, gives its capacity back, and is never delivered; its prompt is not
run again (dynamic sampling, as in DAPO, arXiv:2503.14476: submit further prompts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from gateway.components.arguments import args_model, build_component
from headway.contracts.registry import Registry
from headway.contracts.types import TrajectoryGroup


class Filter(Protocol):
    """Pure and quick: it runs on the event loop."""

    def keep(self, group: TrajectoryGroup) -> str | None:
        """Return None to keep the group, else the reason for dropping it, the same words for the
        same cause."""


FILTERS: Registry[Callable[..., Filter]] = Registry(
    "filter",
    {
        "length": "gateway.filters.length:Length",
        "reward_range": "gateway.filters.reward_range:RewardRange",
        "reward_spread": "gateway.filters.reward_spread:RewardSpread",
    },
    entry_point_group="headway.filters",
)


def register_filter(name: str, target: str | Callable[..., Filter]) -> None:
    """Add a filter: a class or factory, or `"module:attribute"` for a lazy one."""
    FILTERS.register(name, target)


def make_filter(name: str, args: Mapping[str, Any]) -> Filter:
    """Build a filter with its arguments.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit.
    """
    return build_component(FILTERS.get(name), "filter", name, args)


def filter_schema(name: str) -> dict[str, Any]:
    """JSON schema of a filter's arguments."""
    return args_model(FILTERS.get(name)).model_json_schema()
