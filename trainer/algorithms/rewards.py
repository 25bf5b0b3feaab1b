"""Scores -> rewards, of trajectories [N] and of tokens [T]."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.algorithms.segments import Segments


def shape_rewards(scores: Tensor, bias: float, scaling: float, clip: float) -> Tensor:
    """`clip((score + bias) · scaling, ±clip)`.

    Args:
        scores: [N] float.
    Returns:
        [N] float32.
    """
    return ((scores.float() + bias) * scaling).clamp(-clip, clip)


def overlong_penalty(
    num_tokens: Tensor, max_tokens: int, buffer_tokens: int, factor: float = 1.0
) -> Tensor:
    """Falls from 0 to -factor over the last `buffer_tokens` before `max_tokens`.

    Args:
        num_tokens: [N] sampled tokens of each trajectory.
    Returns:
        [N] float32, to be added to the score.
    Source:
        Soft overlong punishment, DAPO (arXiv:2503.14476) eq. 13.
    """
    over = (num_tokens.float() - (max_tokens - buffer_tokens)) / buffer_tokens
    return -factor * over.clamp(0.0, 1.0)


def length_bonus(num_tokens: Tensor, is_right: Tensor, groups: Segments, counts: Tensor) -> Tensor:
    """0.5 for the shortest of a group, falling to -0.5 for the longest; a wrong response gains nothing.

    Args:
        num_tokens: [N] sampled tokens of each trajectory.
        is_right: [N] bool.
        groups: siblings among the trajectories.
        counts: [N] bool, true where a trajectory is part of its group's shortest and longest.
    Returns:
        [N] float32, to be added to the score; 0 in groups whose responses are all of one length.
    Source:
        Length penalty, Kimi k1.5 (arXiv:2501.12599) 2.3.3.
    """
    lengths = num_tokens.double()
    longest = groups.maxima(lengths, counts)[groups.index]
    shortest = -groups.maxima(-lengths, counts)[groups.index]
    spread = longest - shortest
    place = (0.5 - (lengths - shortest) / spread.clamp(min=1.0)).clamp(-0.5, 0.5)
    bonus = torch.where(is_right, place, place.clamp(max=0.0))
    return torch.where(spread > 0, bonus, 0.0).float()


def token_rewards(
    rewards: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """The reward on each sequence's last action, minus `kl_coef · kl` on every action.

    A trajectory may end with tokens of its environment, so the last action is the last true of the mask,
    not the last row. A sequence without actions gets nothing.

    Args:
        rewards: [N].
        loss_mask: [T] bool, true on the actions.
        kl: [T] estimate of KL(policy || reference).
    Returns:
        [T] float32, 0 outside of the mask.
    Source:
        InstructGPT (arXiv:2203.02155) eq. 2, per token.
    """
    result = torch.zeros(loss_mask.shape, dtype=torch.float32, device=loss_mask.device)
    if kl is not None:
        result = torch.where(loss_mask, -kl_coef * kl.float(), 0.0)
    last = sequences.last(loss_mask)
    has_action = last >= 0
    return result.index_add(0, last[has_action], rewards.float()[has_action])


def dense_token_rewards(
    scores: Tensor, loss_mask: Tensor, clip: float, delta: bool = True
) -> Tensor:
    """Rewards from a score after every token: the action of row t gets score t + 1, or what it gained.

    Args:
        scores: [T] of the prefix that ends with each token (not shifted).
        loss_mask: [T] bool, true on the actions (shifted); the last row of a sequence is none.
        clip: bound on the absolute score, before the difference.
        delta: score t + 1 minus score t; potential-based shaping (Ng et al., 1999).
    Returns:
        [T] float32, 0 outside of the mask.
    """
    bounded = scores.float().clamp(-clip, clip)
    following = bounded.roll(-1)
    return torch.where(loss_mask, following - bounded if delta else following, 0.0)


def best_samples(scores: Tensor, num_tokens: Tensor, groups: Segments, keep: int) -> list[int]:
    """Best of n: each group's `keep` best, the longer among equals, then the earlier.

    Args:
        scores: [N] of the verifier.
        num_tokens: [N] sampled tokens.
    Returns:
        Indices into [N], ascending.
    """
    order = sorted(range(len(scores)), key=lambda i: (-float(scores[i]), -int(num_tokens[i]), i))
    taken = [0] * groups.count
    kept = []
    for number in order:
        group = int(groups.index[number])
        if taken[group] < keep:
            taken[group] += 1
            kept.append(number)
    return sorted(kept)
