"""Log-ratios of two policies, per token and per sequence."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.kl import MAX_EXPONENT
from trainer.algorithms.segments import Segments

RatioLevel = Literal["token", "geometric", "sequence"]


def log_ratios(numerator: Tensor, denominator: Tensor, loss_mask: Tensor) -> Tensor:
    """[T] `numerator - denominator`, 0 outside of the mask.

    Masked before any exponential: an infinite ratio outside the mask would give NaN gradients.
    """
    return torch.where(loss_mask, numerator - denominator, 0.0)


def at_level(
    logs: Tensor, loss_mask: Tensor, sequences: Segments, level: RatioLevel = "token"
) -> Tensor:
    """Every token's log-ratio, or its sequence's.

    Args:
        logs: [T] log-ratios of tokens.
        level: `geometric`: the mean over the sequence's actions (GSPO, arXiv:2507.18071);
            `sequence`: their sum, the ratio of whole responses.
    Returns:
        [T], differentiable, 0 outside of the mask.
    """
    if level == "token":
        return logs
    reduced = (sequences.means if level == "geometric" else sequences.sums)(logs, loss_mask)
    return torch.where(loss_mask, reduced.to(logs.dtype)[sequences.index], 0.0)


def bounded_exp(logs: Tensor) -> Tensor:
    """The ratio, between e^-20 and e^20."""
    return logs.clamp(-MAX_EXPONENT, MAX_EXPONENT).exp()
