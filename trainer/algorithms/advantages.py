"""Rewards -> advantages; free functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor, group_ids: Tensor, scale_by_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """Centre rewards within each prompt group, and scale them by the group's spread.

    Args:
        rewards: [N] float, one per trajectory, after shaping.
        group_ids: [N] int64, siblings share a value; groups may be of any size and order.
        scale_by_std: divide by the population standard deviation; false only centres (Dr. GRPO,
            arXiv:2503.20783).
        eps: added to the standard deviation.
    Returns:
        [N] float32. A group with equal rewards gives zeros, not NaN.
    Raises:
        ValueError: shapes differ, N == 0, or a reward is not finite.
    Source:
        GRPO outcome supervision, DeepSeekMath (arXiv:2402.03300) 4.1; population std.
    """
    if rewards.shape != group_ids.shape or rewards.ndim != 1 or rewards.numel() == 0:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)}: two [N] wanted"
        )
    if not torch.isfinite(rewards).all():
        raise ValueError(
            f"rewards hold values that are not finite: {rewards[~torch.isfinite(rewards)]}"
        )
    _, index = torch.unique(group_ids, return_inverse=True)
    values = rewards.double()
    num_groups = int(index.max()) + 1
    sizes = torch.zeros(num_groups, dtype=torch.float64).index_add_(
        0, index, torch.ones_like(values)
    )
    mean = torch.zeros_like(sizes).index_add_(0, index, values) / sizes
    centred = values - mean[index]
    if not scale_by_std:
        return centred.float()
    variance = torch.zeros_like(sizes).index_add_(0, index, centred.square()) / sizes
    return (centred / (variance.sqrt()[index] + eps)).float()


def shape_rewards(scores: Tensor, bias: float, scaling: float, clip: float) -> Tensor:
    """`clip((score + bias) · scaling, ±clip)`.

    Args:
        scores: [N] float.
    Returns:
        [N] float32.
    """
    return ((scores.float() + bias) * scaling).clamp(-clip, clip)
