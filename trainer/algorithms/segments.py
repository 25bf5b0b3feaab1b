"""Sequences packed end to end, and sums over each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer.transfer import to_device


@dataclass(frozen=True, slots=True)
class Segments:
    """Assignment of the elements of a packed column to sequences (or, for [N], to groups)."""

    index: Tensor  # [T] int64, the part of each element
    count: int

    @staticmethod
    def of_lengths(lengths: Sequence[int], device: torch.device | None = None) -> Segments:
        """Sequences of these lengths, one after the other."""
        parts = torch.arange(len(lengths))
        repeats = torch.tensor(lengths, dtype=torch.int64)
        index = torch.repeat_interleave(parts, repeats, output_size=sum(lengths))
        return Segments(index if device is None else to_device(index, device), len(lengths))

    @staticmethod
    def of_names(names: Tensor) -> Segments:
        """Elements of equal names [M] belong together, wherever they stand."""
        values, index = torch.unique(names, return_inverse=True)
        return Segments(index, len(values))

    @staticmethod
    def whole(column: Tensor) -> Segments:
        """Everything is one part."""
        return Segments(torch.zeros(column.shape, dtype=torch.int64, device=column.device), 1)

    def sums(self, values: Tensor, mask: Tensor) -> Tensor:
        """[count] float64 sum of `values` where `mask` is true; differentiable."""
        kept = torch.where(mask, values, 0.0).double()
        zeros = torch.zeros(self.count, dtype=torch.float64, device=values.device)
        return zeros.index_add(0, self.index, kept)

    def sizes(self, mask: Tensor) -> Tensor:
        """[count] float64 number of elements where `mask` is true."""
        return self.sums(torch.ones_like(mask, dtype=torch.float64), mask)

    def means(self, values: Tensor, mask: Tensor) -> Tensor:
        """[count] float64 mean where `mask` is true; 0 where it never is."""
        return self.sums(values, mask) / self.sizes(mask).clamp(min=1.0)

    def maxima(self, values: Tensor, mask: Tensor) -> Tensor:
        """[count] largest value where `mask` is true; -inf where it never is."""
        kept = torch.where(mask, values, -torch.inf)
        floor = torch.full((self.count,), -torch.inf, dtype=kept.dtype, device=kept.device)
        return floor.scatter_reduce(0, self.index, kept, "amax")

    def last(self, mask: Tensor) -> Tensor:
        """[count] position of the last element where `mask` is true; -1 where it never is."""
        positions = torch.arange(len(self.index), device=self.index.device)
        nowhere = torch.full((self.count,), -1, device=self.index.device)
        return nowhere.scatter_reduce(0, self.index, torch.where(mask, positions, -1), "amax")
