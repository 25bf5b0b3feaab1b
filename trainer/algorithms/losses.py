"""Losses as means over the masked tokens; free functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean of `values` [T] where `mask` [T] is true; 0 where it never is."""
    return torch.where(mask, values, 0.0).sum() / mask.sum().clamp(min=1)


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Mean negative log-likelihood.

    Args:
        logprobs: [T] of the labels.
        loss_mask: [T] bool, true = in the loss.
    Returns:
        [] float32.
    """
    return -masked_mean(logprobs, loss_mask)


def decoupled_ppo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    behaviour_weight_cap: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clip around the proximal policy, weigh by proximal / behaviour.

    Args:
        logprobs: [T] under the current policy, differentiable.
        proximal_logprobs: [T] under the policy at the start of the step.
        behaviour_logprobs: [T] from the server that sampled.
        advantages: [T].
        loss_mask: [T] bool, true = in the loss.
        eps_clip, eps_clip_higher: the ratio stays in [1 - eps_clip, 1 + eps_clip_higher]; None takes
            `eps_clip` on both sides.
        behaviour_weight_cap: tokens whose proximal / behaviour exceeds this get weight 0; they stay
            in the denominator. None keeps all.
    Returns:
        loss [] = -mean over masked tokens of w · min(r·A, clip(r)·A) with r = current / proximal,
        and means over the same tokens:
        `clip_fraction`, `behaviour_weight`, `capped_fraction`, `behaviour_kl` (k3 estimate of
        KL(behaviour || proximal)).
    Source:
        AReaL (arXiv:2505.24298) eq. 5; with proximal = behaviour it is PPO (arXiv:1707.06347).
    """
    high = eps_clip if eps_clip_higher is None else eps_clip_higher
    # Masked before the exponential: an infinite ratio outside the mask would give NaN gradients.
    ratio = torch.where(loss_mask, logprobs - proximal_logprobs, 0.0).exp()
    clipped = ratio.clamp(1.0 - eps_clip, 1.0 + high)
    objective = torch.minimum(ratio * advantages, clipped * advantages)
    log_weight = torch.where(loss_mask, proximal_logprobs - behaviour_logprobs, 0.0)
    weight = log_weight.exp()
    kept = (
        weight <= behaviour_weight_cap
        if behaviour_weight_cap is not None
        else torch.ones_like(loss_mask)
    )
    loss = -masked_mean(torch.where(kept, weight, 0.0).detach() * objective, loss_mask)
    with torch.no_grad():
        stats = {
            "clip_fraction": masked_mean(
                (ratio * advantages > clipped * advantages).float(), loss_mask
            ),
            "behaviour_weight": masked_mean(weight, loss_mask),
            "capped_fraction": masked_mean((~kept).float(), loss_mask),
            "behaviour_kl": masked_mean(weight - 1.0 - log_weight, loss_mask),
        }
    return loss, stats
