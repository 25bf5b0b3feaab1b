"""Interface of the engine's memory for keys and values: a row per sequence, and rows that are kept.

A row that no sequence owns any more stays, until its memory is wanted, for prompts that begin alike.
Two caches differ in where a row's tokens are stored: slabs of equal rows on the CPU (`slab_cache`),
blocks of a pool on a GPU (`paged_cache`). One thread uses a cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

OUT_OF_MEMORY = (torch.OutOfMemoryError, MemoryError)
"""Errors of an allocation that may succeed once something is released."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape and type of the keys and values of one token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(eq=False, slots=True, kw_only=True)
class CacheRow:
    """Cache memory of one sequence."""

    tokens: list[int] = field(default_factory=list)
    """The sequence's tokens; the first `length` of them have their keys and values here."""
    length: int = 0
    is_pure: bool = True
    """All of it was computed by the weights that serve now, so another prompt may copy it."""
    is_running: bool = True
    adapter: str = ""
    """Name of the adapter that computed it; empty for the base alone."""
    experts: list[NDArray[np.int16]] = field(default_factory=list)
    """[L, K] of each of the first `length` tokens; empty of a dense model."""

    @property
    def capacity(self) -> int:
        """Number of tokens that fit."""
        raise NotImplementedError


R = TypeVar("R", bound=CacheRow)


class KVCache(ABC, Generic[R]):
    """Rows within one budget."""

    def __init__(self, shape: KVShape, max_context: int, budget_tokens: int, max_kept: int) -> None:
        self.shape = shape
        self.max_context = max_context
        self.budget_tokens = budget_tokens
        self._max_kept = max_kept
        self._kept: OrderedDict[R, None] = OrderedDict()
        """The one that was of no use for longest comes first."""

    @abstractmethod
    def __iter__(self) -> Iterator[R]:
        """Every row, running or kept."""

    @property
    @abstractmethod
    def allocated_tokens(self) -> int:
        """Tokens that memory is held for."""

    @property
    def used_tokens(self) -> int:
        """Tokens whose keys and values are held, shared ones once for each row."""
        return sum(row.length for row in self)

    def reserved_tokens(self, rows: Iterable[R]) -> int:
        """Number of tokens that fit into these rows."""
        return sum(row.capacity for row in rows)

    @abstractmethod
    def allocate(self, length: int, donor: R | None = None, shared: int = 0) -> R | None:
        """A running row for at least `length` tokens; None if memory does not allow it.

        Args:
            donor: a row whose first `shared` positions the new one begins with, if it is still there
                once memory was freed.
        """

    @abstractmethod
    def grow(self, row: R, length: int) -> R | None:
        """The same sequence in a row for at least `length` tokens; None leaves it where it is."""

    @abstractmethod
    def extend(self, row: R, length: int) -> bool:
        """Room for at least `length` tokens in the row itself; false where it would have to move, or
        there is no memory."""

    def touch(self, row: R) -> None:
        """It was of use just now: it is evicted later."""
        if row in self._kept:
            self._kept.move_to_end(row)

    def release(self, row: R, keep: bool) -> None:
        """The sequence gives up its row; kept rows stay for prompts that begin alike."""
        if not (keep and row.is_pure and row.length and self._max_kept):
            self._free(row)
            return
        if len(self._kept) >= self._max_kept:
            self._evict(next(iter(self._kept)))
        self._keep(row)
        self._kept[row] = None

    @abstractmethod
    def truncate(self, row: R, length: int, end: int) -> None:
        """Forget what a step that failed may have written to positions `[length, end)`."""

    def invalidate(self) -> None:
        """The weights changed: kept rows go, running ones are of mixed origin."""
        self.drop_kept()
        for row in self:
            row.is_pure = False

    def invalidate_adapter(self, name: str) -> None:
        """One adapter changed: kept rows of it go, running ones are of mixed origin."""
        for row in [row for row in self._kept if row.adapter == name]:
            self._evict(row)
        for row in self:
            if row.adapter == name:
                row.is_pure = False

    def drop_kept(self) -> None:
        """Free every row that no sequence owns."""
        while self._kept:
            self._evict(next(reversed(self._kept)))

    @abstractmethod
    def clear(self) -> None:
        """Give all memory back; no sequence owns a row."""

    def _evict(self, row: R) -> None:
        del self._kept[row]
        self._free(row)

    @abstractmethod
    def _free(self, row: R) -> None:
        """Free a row that is not read any more."""

    @abstractmethod
    def _keep(self, row: R) -> None:
        """Keep a row whose sequence has ended."""
