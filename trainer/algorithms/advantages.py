"""Rewards -> advantages; free functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale_by_std: bool = True,
    eps: float = 1e-6,
    counts: Tensor | None = None,
) -> Tensor:
    """Centre rewards within each prompt group, and scale them by the group's spread.

    Args:
        rewards: [N] float, one per trajectory, after shaping.
        group_ids: [N] int64, siblings share a value; groups may be of any size and order.
        scale_by_std: divide by the population standard deviation; false only centres (Dr. GRPO,
            arXiv:2503.20783).
        eps: added to the standard deviation.
        counts: [N] bool, true where a trajectory is part of its group's mean and spread: one of each
            sample, whose further branches repeat its reward. None counts all.
    Returns:
        [N] float32. A group with equal rewards gives zeros, not NaN.
    Raises:
        ValueError: shapes differ, N == 0, a reward is not finite, or of a group none counts.
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
    weights = torch.ones_like(values) if counts is None else counts.double()
    zeros = torch.zeros(int(index.max()) + 1, dtype=torch.float64)
    sizes = zeros.index_add(0, index, weights)
    if (sizes == 0).any():
        raise ValueError("of a group no trajectory counts; one of each sample is wanted")
    mean = zeros.index_add(0, index, weights * values) / sizes
    centred = values - mean[index]
    if not scale_by_std:
        return centred.float()
    variance = zeros.index_add(0, index, weights * centred.square()) / sizes
    return (centred / (variance.sqrt()[index] + eps)).float()


def shape_rewards(scores: Tensor, bias: float, scaling: float, clip: float) -> Tensor:
    """`clip((score + bias) · scaling, ±clip)`.

    Args:
        scores: [N] float.
    Returns:
        [N] float32.
    """
    return ((scores.float() + bias) * scaling).clamp(-clip, clip)
