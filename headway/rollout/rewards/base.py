"""Verifiers by name: `register_reward`, `make_reward`.

A reward is made once per name and arguments, and called with what the field's reward functions
take: `reward(prompt, completion, data) -> float | RewardResult`. It is pure; it may be slow or hang,
because `pool.RewardPool` runs it in a process that can be killed. What it raises is recorded as a
failure of the rollout and never becomes a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headway.contracts.errors import ConfigError
from headway.contracts.registry import Registry
from headway.contracts.types import RewardResult

RewardFunction = Callable[[str, str, Mapping[str, Any]], float | RewardResult]

REWARDS: Registry[Callable[..., RewardFunction]] = Registry(
    "reward",
    {
        "exact": "headway.rollout.rewards.exact:ExactMatch",
        "gsm8k": "headway.rollout.rewards.gsm8k:GSM8K",
    },
    entry_point_group="headway.rewards",
)


def register_reward(name: str, target: str | Callable[..., RewardFunction]) -> None:
    """Add a verifier: a class or factory, or `"module:attribute"` for a lazy one."""
    REWARDS.register(name, target)


def make_reward(name: str, args: Mapping[str, Any]) -> RewardFunction:
    """Build a verifier with its arguments.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit.
    """
    return build_reward(REWARDS.get(name), name, args)


def build_reward(
    factory: Callable[..., RewardFunction], name: str, args: Mapping[str, Any]
) -> RewardFunction:
    """Call a factory; `name` is for the message."""
    try:
        return factory(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name!r} does not take {dict(args)!r}: {error}") from error
