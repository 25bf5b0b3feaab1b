"""Sequences -> micro-batches: as few as the token budget allows, and as even as possible."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from headway.contracts.errors import DataError


def pack_by_tokens(
    lengths: Sequence[int], max_tokens: int, min_bins: int = 1, granularity: int = 1
) -> list[list[int]]:
    """Bins of sequence indices, none above `max_tokens`.

    First the smallest number that could do, ceil(sum / budget), is tried with even loads: the longest
    sequence goes to the lightest bin. If one overflows, best-fit decreasing packs as tightly as it can.
    O(N log N), and the same for the same lengths.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens: the budget of a bin.
        min_bins: the number of bins wanted if the budget asks for fewer: ranks that pass the largest
            number of any rank all get that number, save those with fewer units, which get as many
            bins as units.
        granularity: neighbouring sequences that make a unit: they stay together, in their order.
    Raises:
        DataError: a unit is longer than the budget, or the last one is not whole.
    """
    if not lengths:
        return []
    sizes = _unit_sizes(lengths, granularity)
    order = np.argsort(-np.asarray(sizes), kind="stable").tolist()
    if sizes[order[0]] > max_tokens:
        raise _too_long(order[0], sizes[order[0]], max_tokens, granularity)
    fewest = -(-sum(sizes) // max_tokens)
    bins = _even(sizes, order, max_tokens, fewest) or _best_fit(sizes, order, max_tokens)
    wanted = min(min_bins, len(sizes))
    if len(bins) < wanted:
        bins = _even(sizes, order, max_tokens, wanted) or _split(bins, wanted)
    if granularity == 1:
        return bins
    span = range(granularity)
    return [[unit * granularity + place for unit in units for place in span] for units in bins]


def _unit_sizes(lengths: Sequence[int], granularity: int) -> Sequence[int]:
    """Tokens of each unit."""
    if granularity == 1:
        return lengths
    if len(lengths) % granularity:
        raise DataError(
            f"{len(lengths)} sequences are no whole units of {granularity}; a batch wants all members "
            "of a unit, one after the other"
        )
    sizes: list[int] = np.asarray(lengths).reshape(-1, granularity).sum(1).tolist()
    return sizes


def _too_long(unit: int, size: int, max_tokens: int, granularity: int) -> DataError:
    if granularity == 1:
        return DataError(
            f"sequence {unit} of {size} tokens exceeds the micro-batch budget of {max_tokens}; raise "
            "trainer.max_tokens_per_mb or lower sampling.max_new_tokens"
        )
    first, last = unit * granularity, (unit + 1) * granularity - 1
    return DataError(
        f"sequences {first} to {last}, which stay together, have {size} tokens, above the micro-batch "
        f"budget of {max_tokens}; raise trainer.max_tokens_per_mb or shorten these rows"
    )


def _even(
    lengths: Sequence[int], order: Sequence[int], max_tokens: int, count: int
) -> list[list[int]] | None:
    """Longest first to the lightest of `count` bins; None if one overflows."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for index in order:
        load, number = heap[0]
        load += lengths[index]
        if load > max_tokens:
            return None
        bins[number].append(index)
        heapq.heapreplace(heap, (load, number))
    return bins


def _best_fit(lengths: Sequence[int], order: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Longest first to the fullest bin that has room, else to a new one."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # of the bins, ascending: (tokens left, bin)
    for index in order:
        length = lengths[index]
        at = bisect_left(rooms, (length, 0))
        if at == len(rooms):
            room, number = max_tokens, len(bins)
            bins.append([])
        else:
            room, number = rooms.pop(at)
        bins[number].append(index)
        insort(rooms, (room - length, number))
    return bins


def _split(bins: list[list[int]], count: int) -> list[list[int]]:
    """Make as many bins as wanted, by halving those with most members."""
    while len(bins) < count:
        largest = max(bins, key=len)
        bins.append([largest.pop() for _ in range(len(largest) // 2)])
    return bins
