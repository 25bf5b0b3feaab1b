"""Early stop: a policy that has moved too far from its batch's proximal policy learns no more from it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def is_too_far(ratio: Tensor, kl: Tensor, max_ratio: float | None, max_kl: float | None) -> Tensor:
    """True where a micro-batch shall give no gradient.

    Args:
        ratio: [] mean of policy / proximal over its tokens in the loss.
        kl: [] mean estimate of KL(proximal || policy), which is never negative. (AReaL takes the mean of
            logprob - old logprob, whose expectation is minus this KL, so that the larger the KL the
            less it stops.)
        max_ratio, max_kl: values above are too far; None has no bound.
    Returns:
        [] bool.
    """
    result = torch.zeros_like(ratio, dtype=torch.bool)
    if max_ratio is not None:
        result = result | (ratio > max_ratio)
    if max_kl is not None:
        result = result | (kl > max_kl)
    return result


@torch.no_grad()
def mean_over_ranks(
    means: Tensor, weight: Tensor, over_ranks: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the means over the micro-batches of all ranks, from those of each.

    Args:
        means: [K] of this rank's micro-batch.
        weight: [] of it; 0 leaves it out.
        over_ranks: sum over the ranks.
    Returns:
        [K] float64; 0 where all weights are.
    """
    mine = torch.cat([means.double() * weight, weight.double().reshape(1)])
    total = over_ranks(mine)
    return total[:-1] / total[-1].clamp(min=1e-9)
