"""A slotted key/value cache behind the interface that transformers' models call.

Sequences occupy the first rows, so a decode step reads `keys[:n, :, :length]` as a view, without a
gather; a finished sequence's row is filled by the last one. Where the rows of the current forward go
is set by `plan_prefill` or `plan_decode` before it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache


class SlotCache(Cache):
    """`[layer][slot, kv_head, position, head_dim]`, allocated once."""

    def __init__(
        self,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        max_context: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(layers=[])
        shape = (num_slots, num_kv_heads, max_context, head_dim)
        # Zeros, not empty: attention reads masked positions too, and 0 · NaN is NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self._write: tuple[Tensor, Tensor] | None = None
        self._read: tuple[Tensor, Tensor] | None = None
        self._length = 0

    def plan_prefill(self, rows: Tensor, columns: Tensor, slots: Tensor, positions: Tensor) -> None:
        """The next forward is a prefill.

        Args:
            rows, columns: [N] where each prompt token stands in the (left-padded) input.
            slots, positions: [N] where its key and value go.
        """
        self._read = (rows, columns)
        self._write = (slots, positions)

    def plan_decode(self, slots: Tensor, positions: Tensor, length: int) -> None:
        """The next forward samples one token per sequence.

        Args:
            slots: [n] = 0..n-1; positions: [n] where the new key and value go.
            length: positions that attention reads, at least max(positions) + 1.
        """
        self._read = None
        self._write = (slots, positions)
        self._length = length

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[Tensor, Tensor]:
        """Store `[batch, kv_head, length, head_dim]` by the plan; return what attention reads."""
        if self._write is None:
            raise RuntimeError("forward without a plan")
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        slots, positions = self._write
        if self._read is not None:
            rows, columns = self._read
            keys[slots, :, positions] = key_states[rows, :, columns]
            values[slots, :, positions] = value_states[rows, :, columns]
            return key_states, value_states
        keys[slots, :, positions] = key_states[:, :, 0]
        values[slots, :, positions] = value_states[:, :, 0]
        n = key_states.shape[0]
        return keys[:n, :, : self._length], values[:n, :, : self._length]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy a sequence's first `length` positions to another slot."""
        for cache in (*self.keys, *self.values):
            cache[target, :, :length] = cache[source, :, :length]

    def clear(self, slot: int) -> None:
        """Forget a slot whose values are not finite: its next sequence would read them, masked."""
        for cache in (*self.keys, *self.values):
            cache[slot].zero_()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Not used for positions (they are given), but asked for by some models."""
        return 0
