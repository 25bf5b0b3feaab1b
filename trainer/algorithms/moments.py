"""Count, sum and sum of squares: a mean and a spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the elements under a mask, in float64."""

    count: float
    total: float
    squares: float

    @staticmethod
    def of(values: Tensor, mask: Tensor) -> Moments:
        """Of a whole batch."""
        kept = torch.where(mask, values, 0.0).double()
        return Moments(float(mask.sum()), float(kept.sum()), float(kept.square().sum()))

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / max(self.count, 1.0)

    @property
    def variance(self) -> float:
        """Of the population; 0 of nothing."""
        return max(self.squares / max(self.count, 1.0) - self.mean**2, 0.0)
