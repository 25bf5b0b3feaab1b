"""Keys and values of all sequences, in slabs of rows of equal capacity.

    slab of capacity 64:   [row, kv_head, 64, head_dim] per layer
    slab of capacity 96:   [row, kv_head, 96, head_dim] per layer      ... up to the whole context

A sequence owns one row and moves to the next slab when it outgrows it (a few copies of each token,
over its life). Rows of running sequences come first in a slab, so that a decode step reads `[:n]`:
contiguous memory, without a gather, and little of it padding. Behind them stand the kept rows.

Memory is what the slabs hold allocated; it never exceeds the budget.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from inference_server.backends.embedded.kv_cache import OUT_OF_MEMORY, CacheRow, KVCache, KVShape

log = logging.getLogger(__name__)

SMALLEST_ROW = 64
FEWEST_ROWS = 4


@dataclass(eq=False, slots=True, kw_only=True)
class SlabRow(CacheRow):
    """A row of a slab."""

    slab: Slab
    index: int

    @property
    def capacity(self) -> int:
        return self.slab.capacity


@dataclass(eq=False, slots=True)
class Slab:
    """Rows of one capacity: the running ones, then the kept ones, then free ones.

    Behind a row's tokens there are zeros: attention reads masked values too, and 0 · NaN is NaN.
    """

    capacity: int
    store: Tensor
    """[2, layers, rows, kv_heads, capacity, head_dim]: keys, then values."""
    rows: list[SlabRow] = field(default_factory=list)
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

    def add(self) -> SlabRow:
        """A new running row; there is memory for it."""
        row = SlabRow(slab=self, index=len(self.rows))
        self.rows.append(row)
        self._exchange(row.index, self.num_running)
        self.num_running += 1
        return row

    def remove(self, row: SlabRow) -> None:
        """Free a row."""
        self._wipe(row)
        if row.is_running:
            self.keep(row)
        self._exchange(row.index, len(self.rows) - 1)
        self.rows.pop()

    def keep(self, row: SlabRow) -> None:
        """Keep a row whose sequence has ended."""
        self.num_running -= 1
        self._exchange(row.index, self.num_running)
        row.is_running = False

    def _wipe(self, row: SlabRow) -> None:
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


class SlabCache(KVCache[SlabRow]):
    """All slabs, within one budget."""

    def __init__(
        self, shape: KVShape, max_context: int, budget_bytes: int, max_kept: int = 128
    ) -> None:
        super().__init__(shape, max_context, budget_bytes // shape.token_bytes, max_kept)
        self.slabs = [self._new_slab(capacity) for capacity in row_capacities(max_context)]

    def __iter__(self) -> Iterator[SlabRow]:
        for slab in self.slabs:
            yield from slab.rows

    @property
    def allocated_tokens(self) -> int:
        return sum(slab.num_allocated * slab.capacity for slab in self.slabs)

    def allocate(
        self, length: int, donor: SlabRow | None = None, shared: int = 0
    ) -> SlabRow | None:
        if donor is not None:
            self.touch(donor)
        slab = next(slab for slab in self.slabs if slab.capacity >= length)
        if len(slab.rows) == slab.num_allocated and not self._make_room(slab):
            return None
        row = slab.add()
        # Freeing memory may have evicted the donor.
        if donor is not None and donor.length >= shared and shared:
            self.copy(donor, row, shared)
        return row

    def grow(self, row: SlabRow, length: int) -> SlabRow | None:
        if length <= row.slab.capacity:
            return row
        bigger = self.allocate(length)
        if bigger is None:
            return None
        self.copy(row, bigger, row.length)
        bigger.tokens, bigger.is_pure = row.tokens, row.is_pure
        bigger.adapter = row.adapter
        row.slab.remove(row)
        return bigger

    def extend(self, row: SlabRow, length: int) -> bool:
        return length <= row.capacity

    def copy(self, source: SlabRow, target: SlabRow, length: int) -> None:
        """The first `length` positions of a row into another."""
        held = source.slab.store[:, :, source.index, :, :length]
        target.slab.store[:, :, target.index, :, :length] = held
        target.length = length
        target.experts = source.experts[:length]
        self.touch(source)

    def truncate(self, row: SlabRow, length: int, end: int) -> None:
        row.slab.store[:, :, row.index, :, length:end] = 0
        row.length = length
        del row.experts[length:]

    def clear(self) -> None:
        self.drop_kept()
        for slab in self.slabs:
            slab.resize(len(slab.rows))

    def _free(self, row: SlabRow) -> None:
        row.slab.remove(row)

    def _keep(self, row: SlabRow) -> None:
        row.slab.keep(row)

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
                self._resize(other, len(other.rows))
        return len(slab.rows) < slab.num_allocated or self._extend(slab)

    def _extend(self, slab: Slab) -> bool:
        """Twice as many rows, as far as the budget goes; one, where memory allows no more."""
        room = (self.budget_tokens - self.allocated_tokens) // slab.capacity
        if room < 1:
            return False
        more = min(room, max(FEWEST_ROWS, slab.num_allocated))
        return self._resize(slab, slab.num_allocated + more) or (
            more > 1 and self._resize(slab, slab.num_allocated + 1)
        )

    def _resize(self, slab: Slab, num_rows: int) -> bool:
        """Resize a slab; false if there was no memory for it: old and new rows are held for a moment."""
        try:
            slab.resize(num_rows)
        except OUT_OF_MEMORY:
            log.warning("no memory for %d rows of %d tokens", num_rows, slab.capacity)
            return False
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
