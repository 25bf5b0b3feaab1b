"""Keys and values of all sequences, in blocks of a pool that is allocated once.

    pool: [2, layers, blocks, 256, kv_heads, head_dim]        keys, then values

A sequence owns a list of blocks, in the order of its tokens: the block table. Nothing moves when it
grows, and prompts that begin alike share the blocks that are full of the same tokens, which are not
written to any more. Block 0 belongs to no row: rows that only fill up a batch read and write there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.contracts.errors import BackendError
from inference_server.backends.embedded.kv_cache import OUT_OF_MEMORY, CacheRow, KVCache, KVShape

log = logging.getLogger(__name__)

BLOCK_SIZE = 256
"""Tokens: FlashAttention 2 reads blocks whose size is a multiple of it."""


@dataclass(eq=False, slots=True, kw_only=True)
class PagedRow(CacheRow):
    """The blocks of one sequence."""

    blocks: list[int] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        return len(self.blocks) * BLOCK_SIZE


def num_blocks(length: int) -> int:
    """Return the number of blocks for a number of tokens."""
    return -(-length // BLOCK_SIZE)


def pool_tokens(length: int) -> int:
    """Return the tokens of the smallest pool for a sequence of this length."""
    return (1 + num_blocks(length)) * BLOCK_SIZE


class PagedCache(KVCache[PagedRow]):
    """All blocks of one pool."""

    def __init__(
        self,
        shape: KVShape,
        max_context: int,
        budget_bytes: Callable[[], int],
        max_kept: int = 128,
    ) -> None:
        """
        Args:
            budget_bytes: memory for the pool; asked when it is allocated, which is on first use and
                again after `clear`.
        """
        super().__init__(shape, max_context, self._fitting(shape, budget_bytes()), max_kept)
        self.max_blocks = num_blocks(max_context)
        """Blocks of one sequence, at most."""
        self._budget_bytes = budget_bytes
        self._store: Tensor | None = None
        self._free_blocks: list[int] = []
        self._num_users: Counter[int] = Counter()
        """Rows that read a block; free ones are not in it."""
        self._rows: dict[PagedRow, None] = {}

    @property
    def store(self) -> Tensor:
        """[2, layers, blocks, block size, kv_heads, head_dim].

        Raises:
            BackendError: there is no memory even for one sequence.
        """
        if self._store is None:
            self._store = self._allocate_pool()
        return self._store

    def __iter__(self) -> Iterator[PagedRow]:
        return iter(list(self._rows))

    @property
    def allocated_tokens(self) -> int:
        return 0 if self._store is None else (self._store.shape[2] - 1) * BLOCK_SIZE

    def reserved_tokens(self, rows: Iterable[PagedRow]) -> int:
        return len({block for row in rows for block in list(row.blocks)}) * BLOCK_SIZE

    def allocate(
        self, length: int, donor: PagedRow | None = None, shared: int = 0
    ) -> PagedRow | None:
        _ = self.store  # there are no free blocks before there is a pool
        row = PagedRow()
        if donor is not None and shared:
            self.touch(donor)
            row.blocks = donor.blocks[: shared // BLOCK_SIZE]
            self._num_users.update(row.blocks)  # evicting the donor leaves them
            row.length = len(row.blocks) * BLOCK_SIZE
            row.experts = donor.experts[: row.length]
        if not self.extend(row, length):
            self._give_up(row.blocks)
            return None
        self._rows[row] = None
        if donor is not None and donor in self._rows:
            self._copy_rest(donor, row, shared)
        return row

    def grow(self, row: PagedRow, length: int) -> PagedRow | None:
        return row if self.extend(row, length) else None

    def extend(self, row: PagedRow, length: int) -> bool:
        """Give a row blocks for `length` tokens, at the expense of kept rows; false if there are not
        enough.
        """
        missing = num_blocks(length) - len(row.blocks)
        while len(self._free_blocks) < missing and self._kept:
            self._evict(next(iter(self._kept)))
        if len(self._free_blocks) < missing:
            return False
        taken = [self._free_blocks.pop() for _ in range(missing)]
        self._num_users.update(taken)
        row.blocks.extend(taken)
        return True

    def truncate(self, row: PagedRow, length: int, end: int) -> None:
        row.length = length
        del row.experts[length:]

    def clear(self) -> None:
        self.drop_kept()
        if not self._rows:
            self._store = None
            self._free_blocks.clear()

    def _copy_rest(self, donor: PagedRow, row: PagedRow, shared: int) -> None:
        """The part of a block that is full with the donor's tokens, but not with shared ones."""
        rest = shared - row.length
        if rest:
            index = row.length // BLOCK_SIZE
            held = self.store[:, :, donor.blocks[index], :rest]
            self.store[:, :, row.blocks[index], :rest].copy_(held)
            row.length = shared
            row.experts = donor.experts[:shared]

    def _free(self, row: PagedRow) -> None:
        del self._rows[row]
        self._give_up(row.blocks)
        row.blocks = []
        row.length = 0

    def _keep(self, row: PagedRow) -> None:
        row.is_running = False
        self._give_up(row.blocks[num_blocks(row.length) :])
        del row.blocks[num_blocks(row.length) :]

    def _give_up(self, blocks: list[int]) -> None:
        for block in blocks:
            self._num_users[block] -= 1
            if not self._num_users[block]:
                del self._num_users[block]
                self._free_blocks.append(block)

    def _allocate_pool(self) -> Tensor:
        one = self.shape
        least = self.max_blocks
        count = max(least, self._fitting(one, self._budget_bytes()) // BLOCK_SIZE)
        while True:
            shape = (2, one.num_layers, 1 + count, BLOCK_SIZE, one.num_kv_heads, one.head_dim)
            try:
                # Zeros: what is masked is still multiplied, and 0 · NaN is NaN.
                store = torch.zeros(shape, dtype=one.dtype, device=one.device)
                break
            except OUT_OF_MEMORY as error:
                if count == least:
                    raise BackendError(
                        f"no memory for keys and values of one sequence of {self.max_context} tokens "
                        f"({least * BLOCK_SIZE * one.token_bytes} bytes); set a smaller "
                        "backend.max_context, or give the engine more of the GPU"
                    ) from error
                count = max(least, count // 2)
                log.warning("no memory for keys and values as planned: trying %d blocks", count)
        self.budget_tokens = count * BLOCK_SIZE
        self._free_blocks = list(range(count, 0, -1))
        return store

    @staticmethod
    def _fitting(shape: KVShape, budget_bytes: int) -> int:
        """Tokens of the blocks that fit beside block 0."""
        return (budget_bytes // (shape.token_bytes * BLOCK_SIZE) - 1) * BLOCK_SIZE
