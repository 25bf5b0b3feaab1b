"""Attention over paged keys and values: one call of FlashAttention per layer, for decoding rows and
chunks of prompts alike, in a shape that does not depend on how long the sequences are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from inference_server.backends.embedded import paged_cache
from inference_server.backends.embedded.attention import StepTokens
from inference_server.backends.embedded.device import VarlenAttention
from inference_server.backends.embedded.paged_cache import PagedRow, num_blocks


@dataclass(frozen=True, slots=True)
class PagedInputs:
    """The tokens of a step and their slots in the pool, as tensors, on the host or on the device."""

    ids: Tensor
    """[T] int64 tokens."""
    positions: Tensor
    """[T] int64 where each stands in its sequence."""
    slots: Tensor
    """[T] int64 where its keys and values go in the pool seen as [blocks · block size, ...]."""
    wanted: Tensor
    """[w] int64 positions in the step whose logits are wanted."""
    cu_seq_q: Tensor
    """[n + 1] int32 where the tokens of each sequence begin in the step."""
    cu_seq_k: Tensor
    """[n + 1] int32 the same of all its tokens so far."""
    seqused_k: Tensor
    """[n] int32 its tokens so far, those of this step included."""
    block_table: Tensor
    """[n, width] int32 its blocks; 0 behind them."""
    uniforms: Tensor
    """[m] float32 points at which tokens are drawn."""
    targets: Tensor
    """[S] int64 tokens that the first logits are to score."""

    @property
    def tensors(self) -> list[Tensor]:
        """All of them, in order."""
        return [getattr(self, name) for name in self.__slots__]

    def take(self, tokens: Tensor | None) -> None:
        """Replace the first ids by tokens [m] that only the device knows."""
        if tokens is not None:
            self.ids[: len(tokens)].copy_(tokens)


def paged_inputs(tokens: StepTokens, width: int | None = None) -> PagedInputs:
    """Describe a step on the host.

    Args:
        width: columns of the block table; None takes as many as are needed.
    """
    spans = tokens.spans
    starts = np.array([span.start for span in spans], np.int64)
    ends = np.array([span.end for span in spans], np.int64)
    if width is None:
        width = num_blocks(int(ends.max()))
    table = np.zeros((len(spans), width), np.int32)
    for row, span in enumerate(spans):
        blocks = cast(PagedRow, span.row).blocks[: num_blocks(span.end)]
        table[row, : len(blocks)] = blocks
    places = np.array(tokens.positions, np.int64)
    rows = np.repeat(np.arange(len(spans)), ends - starts)
    size = paged_cache.BLOCK_SIZE
    slots = table[rows, places // size].astype(np.int64) * size + places % size
    return PagedInputs(
        ids=torch.tensor(tokens.ids),
        positions=torch.from_numpy(places),
        slots=torch.from_numpy(slots),
        wanted=torch.tensor(tokens.wanted, dtype=torch.int64),
        cu_seq_q=torch.from_numpy(_cumulative(ends - starts)),
        cu_seq_k=torch.from_numpy(_cumulative(ends)),
        seqused_k=torch.from_numpy(ends.astype(np.int32)),
        block_table=torch.from_numpy(table),
        uniforms=torch.tensor(tokens.uniforms, dtype=torch.float32),
        targets=torch.tensor(tokens.targets, dtype=torch.int64),
    )


def padded(inputs: PagedInputs, size: int) -> PagedInputs:
    """A decode step of `size` rows: those behind the real ones read and write block 0."""
    more = size - len(inputs.ids)

    def longer(column: Tensor, value: int) -> Tensor:
        return torch.cat([column, column.new_full((more, *column.shape[1:]), value)])

    def counted_on(column: Tensor) -> Tensor:
        return torch.cat([column, column[-1:] + torch.arange(1, more + 1, dtype=column.dtype)])

    return PagedInputs(
        ids=longer(inputs.ids, 0),
        positions=longer(inputs.positions, 0),
        slots=torch.cat([inputs.slots, torch.arange(more)]),
        wanted=torch.arange(size),
        cu_seq_q=counted_on(inputs.cu_seq_q),
        cu_seq_k=counted_on(inputs.cu_seq_k),
        seqused_k=longer(inputs.seqused_k, 1),
        block_table=longer(inputs.block_table, 0),
        uniforms=longer(inputs.uniforms, 0),
        targets=inputs.targets,
    )


def _cumulative(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int32)


class PagedStep:
    """Positions in the pool of the tokens of one forward pass; made once, used by every layer."""

    def __init__(
        self,
        store: Tensor,
        inputs: PagedInputs,
        attention: VarlenAttention,
        max_q: int,
        max_k: int,
    ) -> None:
        """
        Args:
            store: [2, layers, blocks, block size, kv_heads, head_dim].
            inputs: on the device of `store`.
            max_q, max_k: bounds on the tokens of one sequence in this step, and on all its tokens.
        """
        self._store = store
        self._inputs = inputs
        self._attention = attention
        self._max_q = max_q
        self._max_k = max_k

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `attention.Step`."""
        inputs = self._inputs
        keys, values = self._store[0, layer], self._store[1, layer]
        for cache, new in ((keys, k), (values, v)):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, inputs.slots, new.to(cache.dtype))
        mixed: Tensor = self._attention(
            q.to(keys.dtype),
            keys,
            values,
            inputs.cu_seq_q,
            inputs.cu_seq_k,
            self._max_q,
            self._max_k,
            scale=scale,
            # A causal window counts the positions before the query's own.
            window_size=(-1 if window is None else window - 1, 0),
            enable_gqa=q.shape[1] != keys.shape[2],
            seqused_k=inputs.seqused_k,
            block_table=inputs.block_table,
            # Several splits of paged keys give wrong rows (pytorch/pytorch#194167); and with one, a
            # sequence's numbers do not depend on what else is in the batch.
            num_splits=1,
        )
        return mixed.to(q.dtype)
