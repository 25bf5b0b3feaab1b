"""Centre and scale values over a batch or over each group."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

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
) -> Tensor:
    """`(value - mean) / (std + eps)`, the mean and the std each of the batch, of the group, or absent.

    Groups may be of any size and order. (AReaL cuts groups by a fixed stride, which mixes siblings as
    soon as one of a group is missing, and takes the spread of the batch around the groups' means, which
    is too small; here each level's spread is around its own mean.)

    Args:
        values: [M], of trajectories or of tokens.
        counts: [M] bool, true where an element is part of means and spreads.
        groups: which elements are siblings.
        leave_one_out: the mean of the others, (S - x) / (n - 1); an element alone gets its own value.
        unbiased: divide squares by n - 1; one element alone then has a spread of 1.
        eps: added to the std.
    Returns:
        [M] of the values' type; where `counts` is false it is centred and scaled like its siblings.
    """
    kept = torch.where(counts, values, 0.0)
    whole = Segments.whole(values)
    precise = values.double()
    result = precise
    if center is not None:
        peers = groups if center == "group" else whole
        size, total = peers.sizes(counts)[peers.index], peers.sums(kept, counts)[peers.index]
        result = precise - _mean(precise, size, total, leave_one_out)
    if scale is not None:
        peers = groups if scale == "group" else whole
        result = result / (_variance(kept, counts, peers, unbiased).sqrt() + eps)
    return result.to(values.dtype)


def _mean(values: Tensor, size: Tensor, total: Tensor, leave_one_out: bool) -> Tensor:
    if not leave_one_out:
        return total / size.clamp(min=1.0)
    return torch.where(size > 1, (total - values) / (size - 1).clamp(min=1.0), values)


def _variance(kept: Tensor, counts: Tensor, peers: Segments, unbiased: bool) -> Tensor:
    """[M]; in two passes, so that equal values have none."""
    sizes = peers.sizes(counts)
    centred = kept.double() - peers.means(kept, counts)[peers.index]
    squares = peers.sums(centred.square(), counts)
    variance = squares / sizes.clamp(min=1.0)
    if unbiased:
        variance = torch.where(sizes > 1, squares / (sizes - 1).clamp(min=1.0), 1.0)
    return variance[peers.index]
