"""Rewards -> advantages; free functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.normalization import Level, normalize
from trainer.algorithms.segments import Segments


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    scale: Level | None = "group",
    leave_one_out: bool = False,
    eps: float = 1e-6,
    counts: Tensor | None = None,
    unbiased: bool = True,
    center: Level = "group",
) -> Tensor:
    """Centre rewards within each prompt group, or the batch, and scale them by a spread.

    Args:
        rewards: [N] float, one per trajectory, after shaping.
        group_ids: [N] int64, siblings share a value; groups may be of any size and order.
        scale: divide by the standard deviation of the group (GRPO) or of the batch (LitePPO,
            arXiv:2508.08221); None only centres (Dr. GRPO, arXiv:2503.20783).
        leave_one_out: centre at the mean of the siblings, without the trajectory itself (RLOO,
            arXiv:2402.14740, with `scale=None`).
        eps: added to the standard deviation.
        counts: [N] bool, true where a trajectory is part of its group's mean and spread: one of each
            sample, whose further branches repeat its reward. None counts all.
        unbiased: the standard deviation divides by n - 1 (TRL, verl, AReaL), else by n.
        center: take off the mean of the group, or of the batch (AReaL's `mean_level`).
    Returns:
        [N] float32. A group with equal rewards, and one of a single sample, gives zeros, not NaN.
    Raises:
        ValueError: shapes differ, N == 0, a reward is not finite, or of a group none counts.
    Source:
        GRPO outcome supervision, DeepSeekMath (arXiv:2402.03300) 4.1, which leaves n or n - 1 open.
    """
    if rewards.shape != group_ids.shape or rewards.ndim != 1 or rewards.numel() == 0:
        raise ValueError(
            f"rewards {tuple(rewards.shape)}, group_ids {tuple(group_ids.shape)}: two [N] wanted"
        )
    if not torch.isfinite(rewards).all():
        raise ValueError(
            f"rewards hold values that are not finite: {rewards[~torch.isfinite(rewards)]}"
        )
    groups = Segments.of_names(group_ids)
    counting = torch.ones_like(rewards, dtype=torch.bool) if counts is None else counts
    if (groups.sizes(counting) == 0).any():
        raise ValueError("of a group no trajectory counts; one of each sample is wanted")
    return normalize(rewards, counting, groups, center, scale, leave_one_out, unbiased, eps).float()


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
    truncated: Tensor,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over the actions of packed sequences.

    Rows outside of the mask (prompts, text of tools and users) are no steps: the next value is that of
    the next action. After the last action the value is 0, or, where a sequence was truncated, that of its
    last row (a real flag; AReaL tests whether a row is as long as the longest of its batch).

    Args:
        rewards: [T], on the actions.
        values: [T], of the state that each row acts in; the last row of a sequence is its final state.
        loss_mask: [T] bool, true on the actions.
        truncated: [N] bool, the sequence ran into a limit and would have gone on.
    Returns:
        advantages [T] and returns [T] (advantages + values), 0 outside of the mask, of the values' type.
    Source:
        GAE (arXiv:1506.02438) eq. 16.
    """
    actions = loss_mask.nonzero().flatten()
    index = sequences.index[actions]
    held = values[actions].double()
    rows = sequences.last(torch.ones_like(loss_mask))
    final = torch.where(truncated, values[rows.clamp(min=0)].double(), 0.0)
    following = torch.cat([held[1:], held[:1]])
    goes_on = torch.cat([index[1:] == index[:-1], index.new_zeros(1, dtype=torch.bool)])
    following = torch.where(goes_on[: len(index)], following, final[index])
    errors = rewards[actions].double() + discount * following - held
    estimates = _discounted_sums(errors, index, discount * gae_lambda)
    advantages = torch.zeros_like(values).index_put((actions,), estimates.to(values.dtype))
    returns = torch.zeros_like(values).index_put((actions,), (estimates + held).to(values.dtype))
    return advantages, returns


def discounted_returns(
    rewards: Tensor, loss_mask: Tensor, sequences: Segments, discount: float = 1.0
) -> Tensor:
    """Return for each action what is still to come: `sum over later actions of discount^k · reward`.

    Whitened over the batch it is the advantage of REINFORCE++ (arXiv:2501.03262), with the KL penalty
    among the rewards.

    Args:
        rewards: [T], on the actions.
        loss_mask: [T] bool, true on the actions.
    Returns:
        [T], 0 outside of the mask.
    """
    actions = loss_mask.nonzero().flatten()
    sums = _discounted_sums(rewards[actions].double(), sequences.index[actions], discount)
    return torch.zeros_like(rewards).index_put((actions,), sums.to(rewards.dtype))


def _discounted_sums(values: Tensor, index: Tensor, factor: float) -> Tensor:
    """`y[t] = x[t] + factor · y[t + 1]` within runs of equal `index`, in log2 of the longest run.

    After the round of step k each element holds its own run's next 2k terms (Hillis and Steele, 1986).
    """
    step = 1
    while step < len(values) and bool((same := index[step:] == index[:-step]).any()):
        added = torch.where(same, factor**step * values[step:], 0.0)
        values = torch.cat([values[:-step] + added, values[-step:]])
        step *= 2
    return values
