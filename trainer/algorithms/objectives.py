"""Policy objectives of single tokens, to be maximised. [T] in, [T] out.

All take `ratio` = current / proximal (of tokens or of sequences) and the advantage. Which tokens
were clipped is returned beside it, for metrics.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.ratios import at_level, bounded_exp
from trainer.algorithms.segments import Segments


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


def gmpo_objective(
    log_ratios: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    sequences: Segments,
    eps_clip: float = 0.4,
    eps_clip_higher: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`geometric mean of clip(r) over the sequence · A`; the clip is one-sided, as PPO's minimum.

    The mean has the value of the sequence's, and its gradient is that of the token's own logprob, so that
    each token keeps its advantage. Where a sequence has one advantage, the mean over its tokens has the
    paper's value and gradient; so `aggregation` is usually `sequence_mean_token_mean`.

    Args:
        log_ratios: [T] log(policy / proximal), differentiable, 0 outside of the mask.
        advantages: [T]; a ratio is bounded from above where they are positive, from below elsewhere.
        loss_mask: [T] bool.
        eps_clip, eps_clip_higher: log-ratios stay within [-eps_clip, eps_clip_higher] before the mean;
            None takes `eps_clip` on both sides.
    Returns:
        [T], and bool [T] where a token's ratio was clipped.
    Source:
        GMPO (arXiv:2507.20673).
    """
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    upper, lower = log_ratios.clamp(max=high), log_ratios.clamp(min=-eps_clip)
    clipped = torch.where(advantages > 0, upper, lower)
    own = clipped - clipped.detach()
    mean = at_level(clipped.detach(), loss_mask, sequences, "geometric") + own
    return bounded_exp(mean) * advantages, clipped != log_ratios


def dppo_objective(
    ratio: Tensor,
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    divergence: Literal["tv", "kl"] = "tv",
    max_lower: float = 0.2,
    max_higher: float = 0.2,
) -> tuple[Tensor, Tensor]:
    """`r·A`, and 0 where the token's probability is too far gone in the direction of its advantage.

    A bound on the ratio stops rare tokens early and frequent ones late; this one bounds what the policy
    as a whole moves.

    Args:
        ratio: [T] policy / behaviour, differentiable.
        logprobs: [T] under the policy; no gradient is taken through the mask.
        behaviour_logprobs: [T].
        divergence: of the two policies' distributions over {the token, all others}: `tv` is
            |p - q|, `kl` is KL(behaviour || policy), nats.
        max_lower: bound where A <= 0 and the policy is below the behaviour policy.
        max_higher: bound where A > 0 and the policy is above it.
    Returns:
        [T], and bool [T] where the token was left out.
    Source:
        DPPO (arXiv:2602.04879) with its binary divergences; prime-rl's default loss is `tv`.
    """
    with torch.no_grad():
        policy = logprobs.double().exp().clamp(max=1.0)
        behaviour = behaviour_logprobs.double().exp().clamp(max=1.0)
        distance = _binary_divergence(policy, behaviour, divergence)
        is_higher = (advantages > 0) & (policy > behaviour) & (distance > max_higher)
        is_lower = (advantages <= 0) & (policy < behaviour) & (distance > max_lower)
        is_masked = is_higher | is_lower
    return torch.where(is_masked, 0.0, ratio * advantages), is_masked


def _binary_divergence(policy: Tensor, behaviour: Tensor, kind: Literal["tv", "kl"]) -> Tensor:
    if kind == "tv":
        return (policy - behaviour).abs()
    inside = torch.xlogy(behaviour, behaviour) - torch.xlogy(behaviour, policy)
    others, rest = 1.0 - behaviour, 1.0 - policy
    return inside + torch.xlogy(others, others) - torch.xlogy(others, rest)
