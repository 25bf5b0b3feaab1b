"""Attention of steps in which every sequence decodes, on the CPU: slabs are read where they lie.

When the tokens of a step come in the order of the rows, nothing is gathered and nothing is put back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from inference_server.backends.embedded.attention import Span
from inference_server.backends.embedded.slab_cache import Slab, SlabRow

SMALL = 128 << 10
"""Numbers per thread, of the keys that are read, up to which the fused kernel is faster in 16 bits."""


def decode_order(spans: Sequence[Span]) -> list[int] | None:
    """The spans of a step by slab and row.

    Returns:
        Their indices; None unless all rows that run in these slabs have exactly one token in the step.
    """
    by_slab: dict[int, list[int]] = {}
    num_running = 0
    for index, span in enumerate(spans):
        if span.end - span.start != 1:
            return None
        slab = cast(SlabRow, span.row).slab
        if id(slab) not in by_slab:
            by_slab[id(slab)] = []
            num_running += slab.num_running
        by_slab[id(slab)].append(index)
    if num_running != len(spans):
        return None
    rows = [cast(SlabRow, span.row).index for span in spans]
    return [at for group in by_slab.values() for at in sorted(group, key=rows.__getitem__)]


class SlabDecodeStep:
    """Where the tokens of one such forward lie; a `Step` over spans in `decode_order`."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._parts: list[_Part] = []
        first = 0
        while first < len(spans):
            slab = cast(SlabRow, spans[first].row).slab
            last = first + slab.num_running
            positions = [span.start for span in spans[first:last]]
            self._parts.append(_Part(slab, positions, first))
            first = last

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """As in `attention.Step`."""
        q = q * scale
        mixed = [part.attend(layer, q, k, v, window) for part in self._parts]
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).view(q.shape)


class _Part:
    """The running rows of one slab."""

    def __init__(self, slab: Slab, positions: list[int], first: int) -> None:
        """
        Args:
            positions: [n] of each row's token in its sequence.
            first: position of the first row's token in the step.
        """
        self._tokens = slice(first, first + len(positions))
        self._positions = torch.tensor(positions)
        num_heads, capacity, head_dim = slab.store.shape[3:]
        self._shape = (len(positions) * num_heads, capacity, head_dim)
        places = torch.arange(self._shape[0]).view(-1, num_heads) * capacity
        self._places = places + self._positions[:, None]
        """[n, kv_heads] of each head in a layer seen as [rows · kv_heads · capacity, head_dim]."""
        size = self._shape[0] * capacity * head_dim
        is_short = slab.store.element_size() == 2
        self._is_small = is_short and size <= SMALL * torch.get_num_threads()
        self._keys, self._values = slab.keys.unbind(), slab.values.unbind()
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """[n · kv_heads, groups, head_dim] of scaled queries.

        The query heads that share a key head are rows of one product: nothing is repeated. Two products
        in 16 bits begin with 40 us of their own, so few positions are left to the fused kernel. That one
        is slow for many (15 against 0.6 ms for 32 rows of 512, 2 key heads, bfloat16).
        """
        count, capacity, head_dim = self._shape
        num_rows = len(self._positions)
        keys, values = self._keys[layer].view(-1, head_dim), self._values[layer].view(-1, head_dim)
        for cache, new in ((keys, k), (values, v)):
            cache.index_put_((self._places,), new[self._tokens].to(cache.dtype))
        rows = count * capacity
        keys, values = keys[:rows].view(self._shape), values[:rows].view(self._shape)
        queries = q[self._tokens].view(count, -1, head_dim)
        mask = self._mask(window, queries.dtype)
        if self._is_small:
            q, k, v = (x.view(num_rows, -1, *x.shape[1:]) for x in (queries, keys, values))
            mixed = functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask[:, None], scale=1.0
            )
            return mixed.view(queries.shape)
        scores = torch.bmm(queries, keys.transpose(1, 2))
        scores.view(num_rows, -1, capacity).add_(mask)
        shares = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(shares, values)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[n, 1, capacity] minus infinity where a row does not read, else 0."""
        mask = self._masks.get(window)
        if mask is None:
            columns, last = torch.arange(self._shape[1]), self._positions[:, None]
            is_hidden = columns > last
            if window is not None:
                is_hidden |= columns <= last - window
            mask = torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, float("-inf"))
            self._masks[window] = mask = mask[:, None]
        return mask
