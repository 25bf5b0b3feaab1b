"""Metrics of the distance between the behaviour policy and the proximal one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.algorithms.ratios import bounded_exp, log_ratios


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens of w = proximal / behaviour."""

    count: float
    distance: float  # of |log w|
    k3: float  # of w - 1 - log w
    weight: float  # of w
    square: float  # of w²
    max_distance: float  # the largest |log w|, which is no sum

    @staticmethod
    @torch.no_grad()
    def of(proximal_logprobs: Tensor, behaviour_logprobs: Tensor, loss_mask: Tensor) -> Mismatch:
        """Sum over a batch's tokens; the tensors are [T]."""
        logs = log_ratios(proximal_logprobs, behaviour_logprobs, loss_mask)[loss_mask].double()
        weights = bounded_exp(logs)
        return Mismatch(
            count=float(len(logs)),
            distance=float(logs.abs().sum()),
            k3=float((weights - 1.0 - logs).sum()),
            weight=float(weights.sum()),
            square=float(weights.square().sum()),
            max_distance=float(logs.abs().max()) if len(logs) else 0.0,
        )

    @property
    def mean_distance(self) -> float:
        """Mean |log w|, nats per token."""
        return self.distance / max(self.count, 1.0)

    @property
    def kl(self) -> float:
        """k3 estimate of KL(behaviour || proximal), nats per token."""
        return self.k3 / max(self.count, 1.0)

    @property
    def effective_sample_size(self) -> float:
        """Share of tokens that the weighted ones are worth, (Σw)² / (n·Σw²) (Kish, 1965); 1 on policy."""
        if self.count == 0:
            return 1.0
        return self.weight**2 / (self.count * self.square)
