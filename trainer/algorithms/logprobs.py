"""Logits -> log-probabilities of given tokens; free functions on tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def token_logprobs(logits: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of each label under the temperature-scaled distribution.

    Args:
        logits: [T, V].
        labels: [T] int64.
        temperature: the one that the tokens were sampled with; 0 (greedy) counts as 1, as the
            generation servers do.
    Returns:
        [T] float32, differentiable.
    """
    scaled = logits.float()
    if temperature not in (0.0, 1.0):
        scaled = scaled / temperature
    return -torch.nn.functional.cross_entropy(scaled, labels, reduction="none")
