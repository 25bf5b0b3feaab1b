"""Losses of tokens -> one number, together with the weight that makes it exact over micro-batches.

A micro-batch's loss is `sum(coefficient · value) / weight`. Engines average micro-batches and ranks by
that weight, so the result is that of the whole mini-batch, however it was cut. Tokens are summed in
float64: in float32 their order, which depends on the split, would be visible.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.segments import Segments

AggregationMode = Literal[
    "token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """[] float64 mean of `values` [T] where `mask` [T] is true; 0 where it never is."""
    return torch.where(mask, values, 0.0).sum(dtype=torch.float64) / mask.sum().clamp(min=1)


def aggregate(
    values: Tensor,
    loss_mask: Tensor,
    segments: Segments,
    mode: AggregationMode = "token_mean",
    max_tokens: int | None = None,
) -> Tensor:
    """One number of the tokens in the loss.

    Args:
        values: [T]; values outside of the mask, finite or not, reach neither loss nor gradient.
        loss_mask: [T] bool.
        mode: `token_mean` (DAPO, arXiv:2503.14476): every token counts the same.
            `sequence_mean_token_mean` (GRPO, arXiv:2402.03300): every sequence counts the same.
            `sequence_mean_token_sum`: the mean over sequences of their sums.
            `sequence_mean_token_sum_norm` (Dr. GRPO, arXiv:2503.20783): that divided by `max_tokens`.
            Sequences without a token in the loss are not counted.
        max_tokens: the constant of `sequence_mean_token_sum_norm`.
    Returns:
        [] float64; 0 where nothing is in the loss.
    """
    if mode == "token_mean":
        return masked_mean(values, loss_mask)
    per_sequence = (
        segments.means(values, loss_mask)
        if mode == "sequence_mean_token_mean"
        else segments.sums(values, loss_mask)
    )
    mean = per_sequence.sum() / (segments.sizes(loss_mask) > 0).sum().clamp(min=1)
    if mode == "sequence_mean_token_sum_norm":
        if max_tokens is None:
            raise ValueError("sequence_mean_token_sum_norm divides by max_tokens, which is None")
        mean = mean / max_tokens
    return mean


def aggregation_weight(
    loss_mask: Tensor, segments: Segments, mode: AggregationMode = "token_mean"
) -> float:
    """The weight of a micro-batch's `aggregate`: tokens, or sequences, in the loss."""
    if mode == "token_mean":
        return float(loss_mask.sum())
    return float((segments.sizes(loss_mask) > 0).sum())


def mean_mode(mode: AggregationMode) -> AggregationMode:
    """The mean that has the weight of `mode`; for metrics that are shares."""
    return "token_mean" if mode == "token_mean" else "sequence_mean_token_mean"
