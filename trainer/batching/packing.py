"""Sequences -> micro-batches: as few as the token budget allows, and as even as possible."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

from headway.contracts.errors import DataError


def pack_by_tokens(lengths: Sequence[int], max_tokens: int, min_bins: int = 1) -> list[list[int]]:
    """Bins of sequence indices, none above `max_tokens`.

    First the smallest number that could do, ceil(sum / budget), is tried with even loads: the longest
    sequence goes to the lightest bin. If one overflows, best-fit decreasing packs as tightly as it can.
    O(N log N), and the same for the same lengths.

    Args:
        lengths: tokens of each sequence, at least 1.
        max_tokens: the budget of a bin.
        min_bins: the number of bins wanted if the budget asks for fewer: ranks that pass the largest
            number of any rank all get that number, save those with fewer sequences, which get as many
            bins as sequences.
    Raises:
        DataError: a sequence is longer than the budget.
    """
    if not lengths:
        return []
    sizes = np.asarray(lengths)
    order = np.argsort(-sizes, kind="stable").tolist()
    if lengths[order[0]] > max_tokens:
        raise DataError(
            f"sequence {order[0]} of {lengths[order[0]]} tokens exceeds the micro-batch budget of "
            f"{max_tokens}; raise trainer.max_tokens_per_mb or lower sampling.max_new_tokens"
        )
    fewest = -(-int(sizes.sum()) // max_tokens)
    bins = _even(lengths, order, max_tokens, fewest) or _best_fit(lengths, order, max_tokens)
    wanted = min(min_bins, len(lengths))
    if len(bins) < wanted:
        bins = _even(lengths, order, max_tokens, wanted) or _split(bins, wanted)
    return bins


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
    """As many bins as wanted, by halving those with most members."""
    while len(bins) < count:
        largest = max(bins, key=len)
        bins.append([largest.pop() for _ in range(len(largest) // 2)])
    return bins
