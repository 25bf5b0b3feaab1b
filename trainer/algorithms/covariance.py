"""Tokens whose logprob and advantage are high together: learning from them costs the most entropy.

All looks at a whole batch, before its first update. (The authors' code looks at each micro-batch, so
that what it marks depends on how the batch was cut.)

Source:
    G. Cui et al., "The Entropy Mechanism of Reinforcement Learning" (arXiv:2505.22617).
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def covariances(logprobs: Tensor, advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Return (logprob - mean) · (advantage - mean) of each token; their mean is the covariance.

    Args:
        logprobs, advantages: [T].
        loss_mask: [T] bool, true on the tokens that count.
    Returns:
        [T] float64, 0 outside of the mask.
    """
    count = loss_mask.sum().clamp(min=1)
    product = torch.ones(loss_mask.shape, dtype=torch.float64, device=loss_mask.device)
    for column in (logprobs, advantages):
        kept = torch.where(loss_mask, column, 0.0).double()
        product = product * (kept - kept.sum() / count)
    return torch.where(loss_mask, product, 0.0)


def draw_between(
    values: Tensor, loss_mask: Tensor, lower: float, upper: float, count: int, seed: int
) -> Tensor:
    """Mark at most `count` tokens with a value between two bounds, drawn at random (Clip-Cov).

    Returns:
        [T] bool; the same for the same seed, on every rank and after a restart.
    """
    candidates = ((values > lower) & (values < upper) & loss_mask).nonzero().flatten()
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(candidates), generator=generator)[:count]
    marked = torch.zeros_like(loss_mask)
    marked[candidates[order.to(candidates.device)]] = True
    return marked


def mark_largest(values: Tensor, loss_mask: Tensor, count: int) -> Tensor:
    """Mark the `count` tokens of the largest values, the earlier among equals (KL-Cov).

    Returns:
        [T] bool.
    """
    positions = loss_mask.nonzero().flatten()
    order = values[positions].sort(descending=True, stable=True).indices[:count]
    marked = torch.zeros_like(loss_mask)
    marked[positions[order]] = True
    return marked
