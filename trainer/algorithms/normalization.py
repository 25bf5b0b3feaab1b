"""Centre and scale values over a batch or over each group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from trainer.algorithms.moments import Moments
from trainer.algorithms.segments import Segments

Level = Literal["batch", "group"]


def normalize(
    values: Tensor,
    counts: Tensor,
    groups: Segments,
    center: Level | None,
    scale: Level | None,
    leave_one_out: bool = False,
    unbiased: bool = False,
    eps: float = 1e-5,
    batch: Moments | None = None,
) -> Tensor:
    """`(value - mean) / (std + eps)`, the mean and the std each of the batch, of the group, or absent.

    Groups may be of any size and order. (AReaL cuts groups by a fixed stride, which mixes siblings as
    soon as one of a group is missing, and takes the spread of the batch around the groups' means, which
    is too small; here each level's spread is around its own mean.)

    Args:
        values: [M], of trajectories or of tokens.
        counts: [M] bool, true where an element is part of means and spreads.
        groups: which elements are siblings; whole groups are wanted on one rank.
        leave_one_out: the mean of the others, (S - x) / (n - 1); an element alone gets its own value.
        unbiased: divide squares by n - 1; one element alone then has a spread of 1.
        eps: added to the std.
        batch: of the batch over all ranks; None takes these values.
    Returns:
        [M] of the values' type; where `counts` is false it is centred and scaled like its siblings.
    """
    kept = torch.where(counts, values, 0.0)
    precise = values.double()
    whole = Moments.of(values, counts) if batch is None else batch
    result = precise
    if center is not None:
        size, total = _size_and_total(kept, counts, groups, center, whole)
        result = precise - (
            torch.where(size > 1, (total - precise) / (size - 1).clamp(min=1.0), precise)
            if leave_one_out
            else total / size.clamp(min=1.0)
        )
    if scale == "batch":
        variance = whole.unbiased_variance if unbiased else whole.variance
        result = result / (variance**0.5 + eps)
    elif scale == "group":
        result = result / (_group_variance(kept, counts, groups, unbiased).sqrt() + eps)
    return result.to(values.dtype)


def _size_and_total(
    kept: Tensor, counts: Tensor, groups: Segments, level: Level, whole: Moments
) -> tuple[Tensor, Tensor]:
    if level == "group":
        return groups.sizes(counts)[groups.index], groups.sums(kept, counts)[groups.index]
    ones = torch.ones_like(kept, dtype=torch.float64)
    return ones * whole.count, ones * whole.total


def _group_variance(kept: Tensor, counts: Tensor, groups: Segments, unbiased: bool) -> Tensor:
    """[M]; in two passes, so that equal values have none."""
    sizes = groups.sizes(counts)
    centred = kept.double() - groups.means(kept, counts)[groups.index]
    squares = groups.sums(centred.square(), counts)
    variance = squares / sizes.clamp(min=1.0)
    if unbiased:
        variance = torch.where(sizes > 1, squares / (sizes - 1).clamp(min=1.0), 1.0)
    return variance[groups.index]
