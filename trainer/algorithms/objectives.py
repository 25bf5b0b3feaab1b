"""Policy objectives of single tokens: what is to be made large. [T] in, [T] out.

All take `ratio` = current / proximal (of tokens or of sequences) and the advantage. What was cut off is
said beside, for figures.
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_objective(
    ratio: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    dual_clip: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`min(r·A, clip(r)·A)`, and for A < 0 not below `dual_clip · A`.

    Args:
        ratio: [T], differentiable.
        eps_clip, eps_clip_higher: the ratio stays in [1 - eps_clip, 1 + eps_clip_higher] (clip-higher,
            DAPO, arXiv:2503.14476); None takes `eps_clip` on both sides.
        dual_clip: above 1; bounds what a token with A < 0 and a huge ratio may cost.
    Returns:
        [T], and bool [T] that is true where a bound took the gradient.
    Source:
        PPO (arXiv:1707.06347) eq. 7; dual clip (arXiv:1912.09729).
    """
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    plain = ratio * advantages
    clipped = ratio.clamp(1.0 - eps_clip, 1.0 + high) * advantages
    objective = torch.minimum(plain, clipped)
    is_clipped = plain > clipped
    if dual_clip is not None:
        floor = dual_clip * advantages
        is_below = (advantages < 0) & (objective < floor)
        objective = torch.where(is_below, floor, objective)
        is_clipped = is_clipped | is_below
    return objective, is_clipped


def cispo_objective(
    ratio: Tensor,
    logprobs: Tensor,
    advantages: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`sg(clip(r)) · A · logprob`: the weight is clipped, but no token loses its gradient.

    Args:
        ratio: [T]; no gradient is taken through it.
        logprobs: [T], differentiable, finite.
        eps_clip: 1 leaves the weight without a lower bound, as the paper does.
    Returns:
        [T], and bool [T] where the weight was clipped.
    Source:
        CISPO, MiniMax-M1 (arXiv:2506.13585).
    """
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    weight = ratio.detach()
    clipped = weight.clamp(1.0 - eps_clip, 1.0 + high)
    return clipped * advantages * logprobs, weight != clipped


def sapo_objective(
    ratio: Tensor,
    advantages: Tensor,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """`4/τ · sigmoid(τ·(r - 1)) · A`: a soft gate in place of the clip; gradient A at r = 1.

    Args:
        ratio: [T], differentiable.
        temperature_positive, temperature_negative: τ where A > 0, and elsewhere.
    Source:
        SAPO (arXiv:2511.20347).
    """
    temperature = torch.full_like(advantages, temperature_negative)
    temperature = temperature.masked_fill(advantages > 0, temperature_positive)
    return 4.0 / temperature * torch.sigmoid(temperature * (ratio - 1.0)) * advantages
