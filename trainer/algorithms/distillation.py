"""On-policy distillation: learn from a teacher's logprobs of the policy's own samples."""

from __future__ import annotations

from torch import Tensor

from trainer.algorithms.ratios import bounded_exp, log_ratios


def distillation_advantages(logprobs: Tensor, teacher_logprobs: Tensor) -> Tensor:
    """[T] `teacher - policy` without gradient: minus a sample of the reverse KL, as an advantage.

    Mixed with a reward's advantages, or alone, it goes through any policy objective.

    Source:
        Reverse KL on one's own samples: MiniLLM (arXiv:2306.08543); GKD (arXiv:2306.13649);
        K. Lu, "On-Policy Distillation" (2025).
    """
    return (teacher_logprobs - logprobs).detach()


def distillation_losses(
    logprobs: Tensor, behaviour_logprobs: Tensor, teacher_logprobs: Tensor, loss_mask: Tensor
) -> Tensor:
    """Return `-(policy / behaviour) · (teacher - policy)` per token, the second factor without
    gradient.

    Its gradient is that of KL(policy || teacher). (AReaL, when it also learns from rewards, adds the mean
    of `logprob - teacher`, whose gradient has expectation zero and only adds noise.)

    Args:
        logprobs: [T], differentiable.
        behaviour_logprobs: [T], of the policy that sampled.
        loss_mask: [T] bool.
    Returns:
        [T], 0 outside of the mask.
    """
    ratio = bounded_exp(log_ratios(logprobs, behaviour_logprobs, loss_mask))
    gain = log_ratios(teacher_logprobs, logprobs, loss_mask).detach()
    return -ratio * gain
