"""When a policy has moved too far from where its batch was judged to go on learning from it."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def is_too_far(ratio: Tensor, kl: Tensor, max_ratio: float | None, max_kl: float | None) -> Tensor:
    """Whether a micro-batch shall give no gradient.

    Args:
        ratio: [] mean of policy / proximal over its tokens in the loss.
        kl: [] mean estimate of KL(proximal || policy), which is never negative. (AReaL takes the mean of
            logprob - old logprob, of which the expectation is minus this KL, so that the larger the KL
            the less it stops.)
        max_ratio, max_kl: what is above is too far; None has no bound.
    Returns:
        [] bool.
    """
    result = torch.zeros_like(ratio, dtype=torch.bool)
    if max_ratio is not None:
        result = result | (ratio > max_ratio)
    if max_kl is not None:
        result = result | (kl > max_kl)
    return result
