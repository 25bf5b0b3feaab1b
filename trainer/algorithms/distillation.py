"""On-policy distillation: learn from a teacher's logprobs along the policy's own samples."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Divergence = Literal["reverse", "forward"]
LEAST_REST = 1e-6
"""Least probability of the tokens beyond the top, in float32: its logarithm stays finite."""


def distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[T] `teacher - policy` without gradient: minus a sample of the reverse KL, as an advantage.

    Mixed with a reward's advantages, or alone, it goes through any policy objective.

    Source:
        Reverse KL on one's own samples: MiniLLM (arXiv:2306.08543); GKD (arXiv:2306.13649);
        K. Lu, "On-Policy Distillation" (2025).
    """
    return (teacher_logprobs - logprobs).detach()


def top_divergence(
    logprobs: Tensor, teacher_logprobs: Tensor, divergence: Divergence = "reverse"
) -> Tensor:
    """KL between policy and teacher over K tokens and all others taken as one.

    It is at most the KL over the whole vocabulary, 0 where the two agree, and differentiable in
    `logprobs` without sampling noise.

    Args:
        logprobs, teacher_logprobs: [T, K] of the same K tokens of each position.
        divergence: `reverse` is KL(policy || teacher), `forward` is KL(teacher || policy).
    Returns:
        [T], in nats.
    Source:
        GKD (arXiv:2306.13649), over the top of a vocabulary.
    """
    policy = torch.cat([logprobs, _log_rest(logprobs)], dim=-1)
    teacher = torch.cat([teacher_logprobs, _log_rest(teacher_logprobs)], dim=-1)
    first, second = (policy, teacher) if divergence == "reverse" else (teacher, policy)
    return (first.exp() * (first - second)).sum(-1)


def _log_rest(logprobs: Tensor) -> Tensor:
    """[T, 1] logarithm of the probability that K tokens leave."""
    taken = logprobs.exp().sum(-1, keepdim=True)
    return torch.log1p(-taken.clamp(max=1.0 - LEAST_REST))
