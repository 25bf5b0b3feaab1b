"""The advantage estimators of this distribution, as their settings choose."""

from __future__ import annotations

from headway.contracts.config.advantages import (
    GAEAdvantageConfig,
    GPGAdvantageConfig,
    GRPOAdvantageConfig,
    MaxRLAdvantageConfig,
    OPOAdvantageConfig,
    ReMaxAdvantageConfig,
    RewardAdvantageConfig,
)
from headway.contracts.errors import ConfigError
from trainer.algorithms.advantage_registry import AdvantageEstimator, Advantages, RewardedBatch
from trainer.algorithms.advantages import generalized_advantages, group_advantages
from trainer.algorithms.group_baselines import (
    gpg_advantages,
    maxrl_advantages,
    opo_advantages,
    remax_advantages,
)


def _grpo(args: GRPOAdvantageConfig, batch: RewardedBatch) -> Advantages:
    values = group_advantages(
        batch.rewards,
        batch.group_ids,
        None if args.std_level == "none" else args.std_level,
        leave_one_out=args.leave_one_out,
        counts=batch.counts,
        unbiased=args.unbiased_std,
        center=args.mean_level,
    )
    return Advantages(batch.per_token(values))


def _reward(args: RewardAdvantageConfig, batch: RewardedBatch) -> Advantages:
    return Advantages(batch.per_token(batch.rewards))


def _opo(args: OPOAdvantageConfig, batch: RewardedBatch) -> Advantages:
    num_tokens = batch.sequences.sizes(batch.loss_mask)
    values = opo_advantages(batch.rewards, batch.group_ids, num_tokens, batch.counts)
    return Advantages(batch.per_token(values))


def _gpg(args: GPGAdvantageConfig, batch: RewardedBatch) -> Advantages:
    values = gpg_advantages(batch.rewards, batch.group_ids, batch.counts)
    return Advantages(batch.per_token(values))


def _maxrl(args: MaxRLAdvantageConfig, batch: RewardedBatch) -> Advantages:
    values = maxrl_advantages(batch.rewards, batch.group_ids, batch.counts)
    return Advantages(batch.per_token(values))


def _remax(args: ReMaxAdvantageConfig, batch: RewardedBatch) -> Advantages:
    if batch.is_greedy is None:
        raise ConfigError(
            "advantage.type=remax reads which samples are greedy, and the batch has no "
            "column `is_greedy`"
        )
    values = remax_advantages(batch.rewards, batch.group_ids, batch.is_greedy)
    return Advantages(batch.per_token(values))


def _gae(args: GAEAdvantageConfig, batch: RewardedBatch) -> Advantages:
    if batch.values is None:
        raise ConfigError("advantage.type=gae reads values of a critic, and the batch has none")
    advantages, returns = generalized_advantages(
        batch.earned(batch.rewards),
        batch.values,
        batch.loss_mask,
        batch.sequences,
        batch.truncated,
        batch.discount,
        args.gae_lambda,
    )
    return Advantages(advantages, returns)


GRPO = AdvantageEstimator(_grpo, GRPOAdvantageConfig)
REWARD = AdvantageEstimator(_reward, RewardAdvantageConfig)
OPO = AdvantageEstimator(_opo, OPOAdvantageConfig)
GPG = AdvantageEstimator(_gpg, GPGAdvantageConfig)
REMAX = AdvantageEstimator(_remax, ReMaxAdvantageConfig)
MAXRL = AdvantageEstimator(_maxrl, MaxRLAdvantageConfig)
GAE = AdvantageEstimator(_gae, GAEAdvantageConfig)
