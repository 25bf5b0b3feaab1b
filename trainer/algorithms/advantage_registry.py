"""Advantage estimators by name: what one sees of a batch, and how a package adds its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from torch import Tensor

from headway.contracts.config.advantages import AdvantageConfig
from headway.contracts.config.base import Config
from headway.contracts.registry import Registry
from headway.runtime.plugins import chosen_part
from trainer.algorithms.advantages import discounted_returns
from trainer.algorithms.rewards import token_rewards
from trainer.algorithms.segments import Segments


@dataclass(frozen=True, slots=True)
class RewardedBatch:
    """What an estimator sees of a whole batch, the same on every rank."""

    rewards: Tensor
    """[N] of trajectories, after shaping."""
    group_ids: Tensor
    """[N] int64, siblings share a value."""
    counts: Tensor
    """[N] bool, true on one of each sample's branches: the others repeat its reward."""
    truncated: Tensor
    """[N] bool, ran into a limit."""
    loss_mask: Tensor
    """[T] bool, true on the actions."""
    sequences: Segments
    """Trajectory of each token."""
    is_greedy: Tensor | None = None
    """[N] bool, the first sample of each group; for estimators that read it."""
    discount: float = 1.0
    """Factor per action."""
    kl_penalty: Tensor | None = None
    """[T] taken off each action's reward: `kl_coef` · KL(policy || reference)."""
    dense_rewards: Tensor | None = None
    """[T] of actions, in place of `rewards`."""
    values: Tensor | None = None
    """[T] of the critic, in units of the rewards; None without one."""

    def earned(self, rewards: Tensor) -> Tensor:
        """[T] what each action earns: its dense reward, or on the last action of a trajectory the
        latter's [N]; less the penalty of the KL."""
        columns = (self.loss_mask, self.sequences, self.kl_penalty)
        if self.dense_rewards is None:
            return token_rewards(rewards, *columns, kl_coef=1.0)
        nothing = rewards.new_zeros(rewards.shape)
        return self.dense_rewards + token_rewards(nothing, *columns, kl_coef=1.0)

    def per_token(self, values: Tensor) -> Tensor:
        """[T] the share of each action in its trajectory's value [N]: all of it, less what later
        actions cost, discounted."""
        if self.discount == 1.0 and self.kl_penalty is None and self.dense_rewards is None:
            return values.float()[self.sequences.index]
        earned = self.earned(values)
        return discounted_returns(earned, self.loss_mask, self.sequences, self.discount)


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator returns; values outside of the mask do not count."""

    advantages: Tensor
    """[T] float32"""
    returns: Tensor | None = None
    """[T] targets of the critic; None without one."""


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """Rewards, and values if there is a critic -> advantages."""

    compute: Callable[[Any, RewardedBatch], Advantages]
    """`(args, batch) -> Advantages`."""
    Args: type[BaseModel] = Config
    """Model of its settings."""


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry(
    "advantage estimator",
    {
        "grpo": "trainer.algorithms.advantage_estimators:GRPO",
        "reward": "trainer.algorithms.advantage_estimators:REWARD",
        "opo": "trainer.algorithms.advantage_estimators:OPO",
        "gpg": "trainer.algorithms.advantage_estimators:GPG",
        "maxrl": "trainer.algorithms.advantage_estimators:MAXRL",
        "remax": "trainer.algorithms.advantage_estimators:REMAX",
        "gae": "trainer.algorithms.advantage_estimators:GAE",
    },
    entry_point_group="headway.advantage_estimators",
)


def register_advantage_estimator(name: str, target: str | AdvantageEstimator) -> None:
    """Add an estimator, or `"module:attribute"` for a lazy one.

    Raises:
        ConfigError: the name is taken.
    """
    ADVANTAGE_ESTIMATORS.register(name, target)


def chosen_estimator(config: AdvantageConfig) -> tuple[AdvantageEstimator, Any]:
    """Return the estimator that a configuration chooses, and its settings.

    Raises:
        UnknownName: no estimator is registered under the name.
        ConfigError: the settings do not fit.
    """
    return chosen_part(ADVANTAGE_ESTIMATORS, config)
