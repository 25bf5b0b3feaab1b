"""Count, sum and sum of squares: a mean and a spread."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class MaskedStatistics:
    """Count, sum and sum of squares of the elements under a mask, in float64."""

    count: float
    total: float
    squares: float

    @staticmethod
    def of(values: Tensor, mask: Tensor) -> MaskedStatistics:
        """Compute them over a whole batch."""
        kept = torch.where(mask, values, 0.0).double()
        return MaskedStatistics(float(mask.sum()), float(kept.sum()), float(kept.square().sum()))

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / max(self.count, 1.0)

    @property
    def variance(self) -> float:
        """Population variance; 0 if there are no elements."""
        return max(self.squares / max(self.count, 1.0) - self.mean**2, 0.0)
