"""Keys and values of all sequences, in slabs of rows of equal capacity.

    slab of capacity 64:   [row, kv_head, 64, head_dim] per layer
    slab of capacity 96:   [row, kv_head, 96, head_dim] per layer      ... up to the whole context

A sequence owns one row and moves to the next slab when it outgrows it (a few copies of each token,
over its life). Rows of running sequences come first in a slab, so that a decode step reads `[:n]`:
contiguous memory, without a gather, and little of it padding. Behind them stand rows that no
sequence owns any more, kept for prompts that begin alike, until their memory is wanted.

Memory is what the slabs hold allocated; it never exceeds the budget. One thread uses a cache.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

SMALLEST_ROW = 64
FEWEST_ROWS = 4


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token takes."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(eq=False, slots=True)
class Row:
    """Room for one sequence."""

    slab: Slab
    index: int
    tokens: list[int] = field(default_factory=list)
    """The sequence's tokens; the first `length` of them have their keys and values here."""
    length: int = 0
    is_pure: bool = True
    """All of it was computed by the weights that serve now, so another prompt may copy it."""
    is_running: bool = True


@dataclass(eq=False, slots=True)
class Slab:
    """Rows of one capacity: the running ones, then the kept ones, then free ones.

    Behind a row's tokens there are zeros: attention reads masked values too, and 0 · NaN is NaN.
    """

    capacity: int
    store: Tensor
    """[2, layers, rows, kv_heads, capacity, head_dim]: keys, then values."""
    rows: list[Row] = field(default_factory=list)
    num_running: int = 0

    @property
    def keys(self) -> Tensor:
        """[layers, rows, kv_heads, capacity, head_dim]."""
        return self.store[0]

    @property
    def values(self) -> Tensor:
        """[layers, rows, kv_heads, capacity, head_dim]."""
        return self.store[1]

    @property
    def num_allocated(self) -> int:
        """Rows that there is memory for."""
        return self.store.shape[2]

    def resize(self, num_rows: int) -> None:
        """Allocate for exactly `num_rows`, which hold at least the rows in use."""
        used = len(self.rows)
        shape = (*self.store.shape[:2], num_rows, *self.store.shape[3:])
        store = _zeros(shape, self.store.dtype, self.store.device)
        store[:, :, :used] = self.store[:, :, :used]
        self.store = store

    def add(self) -> Row:
        """A new running row; there is memory for it."""
        row = Row(self, len(self.rows))
        self.rows.append(row)
        self._exchange(row.index, self.num_running)
        self.num_running += 1
        return row

    def remove(self, row: Row) -> None:
        """Free a row."""
        self._wipe(row)
        if row.is_running:
            self.keep(row)
        self._exchange(row.index, len(self.rows) - 1)
        self.rows.pop()

    def keep(self, row: Row) -> None:
        """A running row is nobody's any more, but stays."""
        self.num_running -= 1
        self._exchange(row.index, self.num_running)
        row.is_running = False

    def _wipe(self, row: Row) -> None:
        self.store[:, :, row.index, :, : row.length] = 0
        row.length = 0

    def _exchange(self, first: int, second: int) -> None:
        if first == second:
            return
        one, two = self.rows[first], self.rows[second]
        if one.length and two.length:
            length = max(one.length, two.length)
            places = [first, second]
            self.store[:, :, places, :, :length] = self.store[:, :, places[::-1], :, :length]
        elif one.length:
            self._move(first, second, one.length)
        elif two.length:
            self._move(second, first, two.length)
        self.rows[first], self.rows[second] = two, one
        one.index, two.index = second, first

    def _move(self, source: int, target: int, length: int) -> None:
        held = self.store[:, :, source, :, :length]
        self.store[:, :, target, :, :length] = held
        held.zero_()


def row_capacities(max_context: int) -> list[int]:
    """64, 96, 128, 192, 256, ... up to the whole context: a row is at least two thirds full."""
    capacities = []
    capacity = SMALLEST_ROW
    while capacity < max_context:
        capacities += [size for size in (capacity, capacity * 3 // 2) if size < max_context]
        capacity *= 2
    return [*capacities, max_context]


class KVCache:
    """All slabs, within one budget."""

    def __init__(
        self, shape: KVShape, max_context: int, budget_bytes: int, max_kept: int = 128
    ) -> None:
        self.shape = shape
        self.max_context = max_context
        self.budget_tokens = budget_bytes // shape.token_bytes
        self.slabs = [self._new_slab(capacity) for capacity in row_capacities(max_context)]
        self._max_kept = max_kept
        self._kept: OrderedDict[Row, None] = OrderedDict()
        """The one that was of no use for longest comes first."""

    def __iter__(self) -> Iterator[Row]:
        """Every row, running or kept."""
        for slab in self.slabs:
            yield from slab.rows

    @property
    def allocated_tokens(self) -> int:
        """Tokens that the slabs have memory for."""
        return sum(slab.num_allocated * slab.capacity for slab in self.slabs)

    @property
    def used_tokens(self) -> int:
        """Tokens whose keys and values are held."""
        return sum(row.length for row in self)

    def allocate(self, length: int) -> Row | None:
        """A running row for at least `length` tokens; None if memory does not allow it."""
        slab = next(slab for slab in self.slabs if slab.capacity >= length)
        if len(slab.rows) == slab.num_allocated and not self._make_room(slab):
            return None
        return slab.add()

    def grow(self, row: Row, length: int) -> Row | None:
        """The same sequence in a row for at least `length` tokens; None leaves it where it is."""
        if length <= row.slab.capacity:
            return row
        bigger = self.allocate(length)
        if bigger is None:
            return None
        self.copy(row, bigger, row.length)
        bigger.tokens, bigger.is_pure = row.tokens, row.is_pure
        row.slab.remove(row)
        return bigger

    def copy(self, source: Row, target: Row, length: int) -> None:
        """The first `length` positions of a row into another."""
        held = source.slab.store[:, :, source.index, :, :length]
        target.slab.store[:, :, target.index, :, :length] = held
        target.length = length
        self.touch(source)

    def touch(self, row: Row) -> None:
        """It was of use just now: it is evicted later."""
        if row in self._kept:
            self._kept.move_to_end(row)

    def release(self, row: Row, keep: bool) -> None:
        """The sequence gives up its row; kept rows stay for prompts that begin alike."""
        if not (keep and row.is_pure and row.length and self._max_kept):
            row.slab.remove(row)
            return
        if len(self._kept) >= self._max_kept:
            self._evict(next(iter(self._kept)))
        row.slab.keep(row)
        self._kept[row] = None

    def taint(self) -> None:
        """The weights changed: kept rows go, running ones are of mixed origin."""
        self.drop_kept()
        for row in self:
            row.is_pure = False

    def drop_kept(self) -> None:
        """Free every row that no sequence owns."""
        while self._kept:
            self._evict(next(reversed(self._kept)))

    def clear(self) -> None:
        """Give all memory back; no sequence owns a row."""
        self.drop_kept()
        for slab in self.slabs:
            slab.resize(len(slab.rows))

    def _evict(self, row: Row) -> None:
        del self._kept[row]
        row.slab.remove(row)

    def _make_room(self, slab: Slab) -> bool:
        """Memory for one more row: the budget's, a kept row's, or what other slabs do not use."""
        if self._extend(slab):
            return True
        kept = next((row for row in self._kept if row.slab is slab), None)
        if kept is not None:
            self._evict(kept)
            return True
        self.drop_kept()
        for other in self.slabs:
            if other.num_allocated > len(other.rows):
                other.resize(len(other.rows))
        return self._extend(slab)

    def _extend(self, slab: Slab) -> bool:
        """Twice as many rows, as far as the budget goes."""
        room = (self.budget_tokens - self.allocated_tokens) // slab.capacity
        if room < 1:
            return False
        slab.resize(slab.num_allocated + min(room, max(FEWEST_ROWS, slab.num_allocated)))
        return True

    def _new_slab(self, capacity: int) -> Slab:
        one = self.shape
        shape = (2, one.num_layers, 0, one.num_kv_heads, capacity, one.head_dim)
        return Slab(capacity, torch.zeros(shape, dtype=one.dtype, device=one.device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on the CPU of memory that is taken page by page, when it is first written to."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not size:
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(dtype).view(shape)
