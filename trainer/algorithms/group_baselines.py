"""Baselines of a prompt's group other than its mean and spread; rewards [N] -> advantages [N]."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.segments import Segments

SMALLEST_MEAN = 1e-6
"""A mean reward below this counts as none."""


def opo_advantages(
    rewards: Tensor, group_ids: Tensor, num_tokens: Tensor, counts: Tensor
) -> Tensor:
    """Rewards less the mean of their group, weighted by the responses' lengths.

    It is the baseline of the least variance, if the gradients of tokens are independent and of one size:
    a response's gradient then varies as its length does.

    Args:
        rewards: [N].
        group_ids: [N] int64, siblings share a value.
        num_tokens: [N] sampled tokens.
        counts: [N] bool, true where a trajectory is part of its group's mean.
    Returns:
        [N] float32; a group without tokens has a baseline of 0.
    Source:
        OPO (arXiv:2505.23585).
    """
    groups, lengths = Segments.of_names(group_ids), num_tokens.double()
    weighted = groups.sums(lengths * rewards.double(), counts)
    baselines = weighted / groups.sums(lengths, counts).clamp(min=1.0)
    return (rewards.double() - baselines[groups.index]).float()


def gpg_advantages(rewards: Tensor, group_ids: Tensor, counts: Tensor) -> Tensor:
    """Rewards less their group's mean, times all samples / samples of groups that teach something.

    A group whose rewards are all equal has no gradient, but counts in the loss's denominator; the factor
    takes it out again.

    Args:
        rewards, group_ids, counts: as of `opo_advantages`.
    Returns:
        [N] float32; zeros where no group's rewards differ.
    Source:
        GPG (arXiv:2504.02546), without its division by the standard deviation.
    """
    groups = Segments.of_names(group_ids)
    centred = rewards.double() - groups.means(rewards, counts)[groups.index]
    differs = groups.maxima(rewards, counts) > -groups.maxima(-rewards, counts)
    num_useful = (counts & differs[groups.index]).sum().clamp(min=1)
    scaled = centred * (counts.sum().double() / num_useful)
    return torch.where(differs[groups.index], scaled, 0.0).float()


def maxrl_advantages(rewards: Tensor, group_ids: Tensor, counts: Tensor) -> Tensor:
    """Rewards less their group's mean, divided by that mean: what few siblings solve counts for more.

    With rewards of 0 and 1 the gradient is that of the log-likelihood of solving the prompt, cut after as
    many terms as the group has samples.

    Args:
        rewards, group_ids, counts: as of `opo_advantages`; rewards are not negative.
    Returns:
        [N] float32; zeros where the mean is 0.
    Raises:
        ValueError: a reward is negative.
    Source:
        MaxRL (arXiv:2602.02710).
    """
    lowest = float(rewards.min())
    if lowest < 0:
        raise ValueError(
            f"maxrl divides by a group's mean reward, and one is {lowest}; rewards of 0 and above are "
            "wanted (reward_bias shifts them)"
        )
    groups = Segments.of_names(group_ids)
    means = groups.means(rewards, counts)[groups.index]
    relative = (rewards.double() - means) / means.clamp(min=SMALLEST_MEAN)
    return torch.where(means >= SMALLEST_MEAN, relative, 0.0).float()


def remax_advantages(rewards: Tensor, group_ids: Tensor, is_greedy: Tensor) -> Tensor:
    """Rewards less that of their group's greedy sample, whose own advantage is 0.

    Args:
        rewards, group_ids: as of `opo_advantages`.
        is_greedy: [N] bool, true on all branches of the sample that took the most likely tokens.
    Returns:
        [N] float32.
    Raises:
        ValueError: a group has no greedy sample.
    Source:
        ReMax (arXiv:2310.10505).
    """
    groups = Segments.of_names(group_ids)
    if bool((groups.sizes(is_greedy) == 0).any()):
        raise ValueError(
            "remax takes off the reward of a group's greedy sample, and a group has none; set "
            "rollout.workflow.args.greedy_first"
        )
    baselines = groups.means(rewards, is_greedy)
    return (rewards.double() - baselines[groups.index]).float()
