"""Count, sum and sum of squares: what ranks add up to share a mean and a spread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

OverRanks = Callable[[list[float]], list[float]]
"""Element-wise sum or maximum over the ranks, as `Topology.sum` and `Topology.maxima`."""


@dataclass(frozen=True, slots=True)
class Moments:
    """Of the elements under a mask, in float64."""

    count: float
    total: float
    squares: float

    @staticmethod
    def of(values: Tensor, mask: Tensor) -> Moments:
        """Of one rank."""
        kept = torch.where(mask, values, 0.0).double()
        return Moments(float(mask.sum()), float(kept.sum()), float(kept.square().sum()))

    def shared(self, sum_over_ranks: OverRanks) -> Moments:
        """Of all ranks; collective."""
        count, total, squares = sum_over_ranks([self.count, self.total, self.squares])
        return Moments(count, total, squares)

    @property
    def mean(self) -> float:
        """0 of nothing."""
        return self.total / max(self.count, 1.0)

    @property
    def variance(self) -> float:
        """Of the population; 0 of nothing."""
        return max(self.squares / max(self.count, 1.0) - self.mean**2, 0.0)

    @property
    def unbiased_variance(self) -> float:
        """Of the sample (n - 1); 1 where n < 2, which leaves no spread to measure."""
        if self.count < 2:
            return 1.0
        return self.variance * self.count / (self.count - 1)
