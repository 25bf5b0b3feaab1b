"""Scores of trajectories -> advantages of tokens, as the configuration says."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from trainer.algorithms.advantages import discounted_returns, group_advantages
from trainer.algorithms.normalization import normalize
from trainer.algorithms.rewards import overlong_penalty, shape_rewards, token_rewards
from trainer.algorithms.segments import Segments


def trajectory_rewards(
    config: AlgorithmConfig, scores: Tensor, num_tokens: Tensor, truncated: Tensor
) -> Tensor:
    """Penalise, shape, and leave out what was cut off.

    Args:
        scores: [N] of the verifier.
        num_tokens: [N] sampled tokens.
        truncated: [N] bool, ran into a limit.
    Returns:
        [N] float32.
    """
    if config.overlong is not None:
        rule = config.overlong
        scores = scores.float() + overlong_penalty(
            num_tokens, rule.max_tokens, rule.buffer_tokens, rule.factor
        )
    rewards = shape_rewards(scores, config.reward_bias, config.reward_scaling, config.reward_clip)
    return torch.where(truncated, 0.0, rewards) if config.zero_truncated else rewards


def token_advantages(
    config: AlgorithmConfig,
    rewards: Tensor,
    group_ids: Tensor,
    counts: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """What each token of a trajectory gets of its reward, less the baseline.

    A penalty of the KL is no part of the baseline: each action loses what it and later ones cost.

    Args:
        rewards: [N], of whole groups.
        group_ids: [N] int64, siblings share a value.
        counts: [N] bool, one of each sample's branches.
        loss_mask: [T] bool, true on the actions.
        kl: [T] estimate of KL(policy || reference), taken off the rewards `kl_coef` times.
    Returns:
        [T] float32.
    """
    values = rewards
    if config.baseline != "none":
        values = group_advantages(
            rewards,
            group_ids,
            config.scale_level if config.scale_by_std else None,
            leave_one_out=config.baseline == "leave_one_out",
            counts=counts,
            unbiased=config.unbiased_std,
        )
    if config.discount == 1.0 and kl is None:
        return values[sequences.index]
    placed = token_rewards(values, loss_mask, sequences, kl, kl_coef)
    return discounted_returns(placed, loss_mask, sequences, config.discount)


def normalized_advantages(
    config: AlgorithmConfig,
    advantages: Tensor,
    group_ids: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
) -> Tensor:
    """Centre and scale over the tokens in the loss, of the batch or of each group.

    Args:
        advantages: [T], of a whole batch.
        group_ids: [N] int64.
        loss_mask: [T] bool; what is not in the loss is in no mean.
    Returns:
        [T], 0 outside of the mask; unchanged where `advantage_norm` is none.
    """
    if config.advantage_norm == "none":
        return advantages
    level = config.advantage_norm
    groups = Segments.of_names(group_ids[sequences.index])
    return torch.where(loss_mask, normalize(advantages, loss_mask, groups, level, level), 0.0)
