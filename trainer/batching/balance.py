"""Sequences -> shares of the ranks of equal cost, by largest differencing."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from headway.contracts.errors import DataError

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def partition_by_tokens(
    lengths: Sequence[int],
    num_parts: int,
    *,
    attention_weight: float = 0.0,
    group_ids: Sequence[Hashable] | None = None,
    equal_counts: bool = False,
) -> list[list[int]]:
    """Shares of sequence indices, each in ascending order, with costs as equal as can be found.

    The same on every rank that asks with the same lengths. The cost of a sequence of L tokens is
    L + `attention_weight` · L².

    Args:
        lengths: tokens of each sequence, at least 1.
        num_parts: number of ranks.
        attention_weight: cost per squared token. A layer of a plain decoder of hidden size d has about
            12 d² weights, for which it takes 24 d² L operations, and 2 d L² for causal attention: the
            weight is 1 / (12 d). 0 balances tokens, that is memory.
        group_ids: sequences with equal ids stay together, wherever they stand; None lets each go alone.
        equal_counts: all shares have the same number of sequences (of groups, with `group_ids`), give or
            take one. The balance suffers: a few long ones can no longer stand against many short ones.
    Raises:
        DataError: fewer sequences (or groups) than parts.
    Source:
        Karmarkar and Karp, "The Differencing Method of Set Partitioning" (1982); equal counts as in
        Michiels et al., "Performance ratios for the differencing method applied to the balanced number
        partitioning problem" (2003).
    """
    unit_of = _units_of(len(lengths), group_ids)
    num_units = max(unit_of, default=-1) + 1
    if num_units < num_parts:
        kind = "sequences" if group_ids is None else "groups"
        raise DataError(f"{num_units} {kind} cannot be shared by {num_parts} ranks")
    if num_parts == 1:
        return [list(range(len(lengths)))]
    tokens = np.asarray(lengths, dtype=np.float64)
    costs = np.bincount(unit_of, tokens + attention_weight * tokens**2).astype(np.float64)
    part_of = _parts_of(costs, num_parts, equal_counts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    for index, unit in enumerate(unit_of):
        parts[part_of[unit]].append(index)
    return parts


def _units_of(count: int, group_ids: Sequence[Hashable] | None) -> list[int]:
    """Number of the indivisible unit of each sequence: its group, or itself."""
    if group_ids is None:
        return list(range(count))
    numbers: dict[Hashable, int] = {}
    if len(group_ids) != count:
        raise ValueError(f"{len(group_ids)} group_ids for {count} sequences, wanted one for each")
    return [numbers.setdefault(group_id, len(numbers)) for group_id in group_ids]


def _parts_of(costs: Floats, num_parts: int, equal_counts: bool) -> list[int]:
    """The part of each unit."""
    order = np.argsort(-costs, kind="stable")
    # Equal counts: begin with rows of one unit for each part, and only ever add whole rows.
    per_row = num_parts if equal_counts else 1
    sorted_costs = np.zeros(-(-len(costs) // per_row) * per_row)
    sorted_costs[: len(costs)] = costs[order]
    rows = np.zeros((len(sorted_costs) // per_row, num_parts))
    rows[:, :per_row] = sorted_costs.reshape(-1, per_row)
    places = np.concatenate([parts[:per_row] for parts in _difference(list(rows))])
    part_of = np.empty_like(order)
    part_of[order] = places[: len(costs)]
    return list(part_of.tolist())


def _difference(rows: list[Floats]) -> list[Ints]:
    """The part that each place of each row goes to.

    A row is a partial solution: one load per part, descending. The two whose loads differ most become
    one, the heaviest of either with the lightest of the other, until one is left: its places are the
    parts.
    """
    num_first, num_parts = len(rows), len(rows[0])
    heap = [(row[-1] - row[0], number) for number, row in enumerate(rows)]
    heapq.heapify(heap)
    merges: list[tuple[int, int, Ints]] = []
    while len(heap) > 1:
        _, left = heapq.heappop(heap)
        _, right = heap[0]
        loads = rows[left] + rows[right][::-1]
        places = np.argsort(-loads, kind="stable")
        loads = loads[places]
        heapq.heapreplace(heap, (loads[-1] - loads[0], len(rows)))
        rows.append(loads)
        merges.append((left, right, places))
    parts = [np.arange(num_parts)] * len(rows)
    for number in reversed(range(num_first, len(rows))):
        left, right, places = merges[number - num_first]
        of_left = np.empty_like(places)
        of_left[places] = parts[number]
        parts[left], parts[right] = of_left, of_left[::-1]
    return parts[:num_first]
