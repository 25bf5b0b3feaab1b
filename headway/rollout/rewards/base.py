"""Verifiers by name: `register_reward`, `make_reward`.

A reward is made once per name and arguments, and called with an `Answer`. It is pure; it may be slow or
hang, because `pool.RewardPool` runs it in a process that can be killed. What it raises is recorded as a
failure of the rollout and never becomes a score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from headway.contracts.errors import ConfigError
from headway.contracts.registry import Registry
from headway.contracts.types import RewardResult
from headway.rollout.facilities import Facilities


@dataclass(frozen=True, slots=True)
class Answer:
    """What is judged."""

    prompt: str
    completion: str
    data: Mapping[str, Any]
    """The rest of the prompt's row."""
    prompt_ids: Sequence[int] = ()
    completion_ids: Sequence[int] = ()


RewardFunction = Callable[[Answer], float | RewardResult]
"""Trusted, pure and synchronous: it runs in a process that can be killed. It may have a method
`quick(answer) -> float | RewardResult | None`, which settles easy cases in microseconds, in time linear
in the answer; that one runs on the event loop, and None hands the answer to the process."""


@runtime_checkable
class AsyncReward(Protocol):
    """A reward that awaits others: a sandbox, a reward model. It runs on the event loop."""

    async def judge(self, answer: Answer, facilities: Facilities) -> float | RewardResult:
        """The judgement of one answer.

        Raises:
            RewardOutage: somebody it needs failed; it is called again.
        """


Reward = RewardFunction | AsyncReward

REWARDS: Registry[Callable[..., Reward]] = Registry(
    "reward",
    {
        "exact": "headway.rollout.rewards.exact:ExactMatch",
        "gsm8k": "headway.rollout.rewards.gsm8k:GSM8K",
    },
    entry_point_group="headway.rewards",
)


def register_reward(name: str, target: str | Callable[..., Reward]) -> None:
    """Add a verifier: a class or factory, or `"module:attribute"` for a lazy one."""
    REWARDS.register(name, target)


def make_reward(name: str, args: Mapping[str, Any]) -> Reward:
    """Build a verifier with its arguments.

    Raises:
        UnknownName: nobody registered the name.
        ConfigError: the arguments do not fit.
    """
    return build_reward(REWARDS.get(name), name, args)


def build_reward(factory: Callable[..., Reward], name: str, args: Mapping[str, Any]) -> Reward:
    """Call a factory; `name` is for the message."""
    try:
        return factory(**args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward {name!r} does not take {dict(args)!r}: {error}") from error
