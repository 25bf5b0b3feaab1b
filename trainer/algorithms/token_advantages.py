"""Scores -> rewards of trajectories, and advantages of tokens -> normalised ones, as configured."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.contracts.config.algorithm import AlgorithmConfig
from trainer.algorithms.normalization import normalize
from trainer.algorithms.rewards import length_bonus, overlong_penalty, shape_rewards
from trainer.algorithms.segments import Segments


def trajectory_rewards(
    config: AlgorithmConfig,
    scores: Tensor,
    num_tokens: Tensor,
    truncated: Tensor,
    groups: Segments,
    counts: Tensor,
) -> Tensor:
    """Penalise and shape scores, and give truncated trajectories less, or none.

    Args:
        scores: [N] of the verifier.
        num_tokens: [N] sampled tokens.
        truncated: [N] bool, ran into a limit.
        groups: siblings among the trajectories.
        counts: [N] bool, one of each sample's branches.
    Returns:
        [N] float32.
    """
    penalised = scores.float()
    if config.overlong is not None:
        rule = config.overlong
        bounds = (rule.max_tokens, rule.buffer_tokens, rule.factor)
        penalised = penalised + overlong_penalty(num_tokens, *bounds)
    if config.length_penalty is not None:
        is_right = scores > config.length_penalty.right_above
        bonus = length_bonus(num_tokens, is_right, groups, counts)
        penalised = penalised + config.length_penalty.coef * bonus
    rewards = shape_rewards(
        penalised, config.reward_bias, config.reward_scaling, config.reward_clip
    )
    if config.zero_truncated:
        return torch.where(truncated, 0.0, rewards)
    # A penalty of a reward below 0 would be a gain.
    scaled = config.truncated_reward_scale * rewards
    return torch.where(truncated & (rewards > 0), scaled, rewards)


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
        loss_mask: [T] bool; tokens outside of the loss are in no mean.
    Returns:
        [T], 0 outside of the mask; unchanged where `advantage_norm` is none.
    """
    if config.advantage_norm == "none":
        return advantages
    level = config.advantage_norm
    groups = Segments.of_names(group_ids[sequences.index])
    return torch.where(loss_mask, normalize(advantages, loss_mask, groups, level, level), 0.0)
