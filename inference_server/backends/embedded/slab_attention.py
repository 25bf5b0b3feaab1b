"""Attention over slabs: all decoding rows of a slab in one batched product, each chunk on its own.

For the CPU, and for a GPU without FlashAttention for the model's type.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from inference_server.backends.embedded.attention import Span
from inference_server.backends.embedded.slab_cache import Slab, SlabRow

QUERY_TILE = 256
"""Queries of a chunk that a GPU reads at once: the mask has a row for each, in every group."""


@dataclass(slots=True)
class _Chunk:
    span: Span
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Decode:
    """The running rows of a slab, some of which have one token in this step."""

    queries: Tensor
    """[n] position in the step of each row's token (0 for rows without one)."""
    positions: Tensor
    """[n] position of that token in its sequence (0 for rows without one)."""
    rows: Tensor
    """[m] the rows that have one."""
    outputs: Tensor
    """[m] where their results go in the step."""
    capacity: int
    """Positions read of each row: all, because a product over contiguous rows is faster than one over
    fewer positions of each (1.8 against 5.2 ms for 128 rows, 160 positions, bfloat16).
    """
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _SlabWork:
    """Work of a step in one slab."""

    slab: Slab
    tokens: Tensor
    """[S] positions in the step of the tokens that are written here."""
    places: Tensor
    """[S · kv_heads] where their heads go in the slab seen as [rows · kv_heads · capacity, head_dim]."""
    decode: _Decode | None
    chunks: list[_Chunk]


class SlabStep:
    """Positions in the cache of the tokens of one forward pass; made once, used by every layer."""

    def __init__(self, spans: Sequence[Span], num_kv_heads: int, device: torch.device) -> None:
        self._device = device
        by_slab: dict[int, list[Span]] = {}
        for span in spans:
            by_slab.setdefault(id(_row(span).slab), []).append(span)
        self.works = [self._work(group, num_kv_heads) for group in by_slab.values()]

    def _work(self, spans: list[Span], num_kv_heads: int) -> _SlabWork:
        slab = _row(spans[0]).slab
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for span in spans:
            count = span.end - span.start
            tokens.extend(range(span.first, span.first + count))
            rows.extend([_row(span).index] * count)
            positions.extend(range(span.start, span.end))
        heads = torch.arange(num_kv_heads)
        places = (
            torch.tensor(rows)[:, None] * num_kv_heads + heads
        ) * slab.capacity + torch.tensor(positions)[:, None]
        singles = [span for span in spans if span.end - span.start == 1]
        chunks = [_Chunk(span) for span in spans if span.end - span.start > 1]
        return _SlabWork(
            slab=slab,
            tokens=self._tensor(tokens),
            places=places.flatten().to(self._device),
            decode=self._decode(slab, singles) if singles else None,
            chunks=chunks,
        )

    def _decode(self, slab: Slab, singles: list[Span]) -> _Decode:
        queries, positions = [0] * slab.num_running, [0] * slab.num_running
        for span in singles:
            queries[_row(span).index] = span.first
            positions[_row(span).index] = span.start
        return _Decode(
            queries=self._tensor(queries),
            positions=self._tensor(positions),
            rows=self._tensor([_row(span).index for span in singles]),
            outputs=self._tensor([span.first for span in singles]),
            capacity=slab.capacity,
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See `attention.Step`."""
        output = torch.empty_like(q, memory_format=torch.contiguous_format)
        head_dim = q.shape[-1]
        for work in self.works:
            keys, values = work.slab.keys[layer], work.slab.values[layer]
            for cache, new in ((keys, k), (values, v)):
                chosen = new[work.tokens].reshape(-1, head_dim)
                cache.view(-1, head_dim).index_copy_(0, work.places, chosen.to(cache.dtype))
            if work.decode is not None:
                decoded = _decode(q, keys, values, work.decode, scale, window)
                output.index_copy_(0, work.decode.outputs, decoded)
            for chunk in work.chunks:
                span = chunk.span
                place = slice(span.first, span.first + span.end - span.start)
                output[place] = _prefill(q[place], keys, values, chunk, scale, window)
        return output


def _row(span: Span) -> SlabRow:
    return cast(SlabRow, span.row)


def _decode(
    q: Tensor, keys: Tensor, values: Tensor, decode: _Decode, scale: float, window: int | None
) -> Tensor:
    """[m, heads, head_dim] of the decoding rows of a slab.

    The query heads that share a key head are rows of one product: nothing is repeated. On the CPU
    two products beat the fused kernel, which is slow for a single query (15 against 0.6 ms for 32
    rows of 512 positions, 2 key heads, bfloat16).
    """
    n, num_kv_heads = len(decode.queries), keys.shape[1]
    queries = q[decode.queries].view(n, num_kv_heads, -1, q.shape[-1])
    k, v = keys[:n], values[:n]
    mask = _decode_mask(decode, window)
    if q.device.type != "cpu":
        mixed = scaled_dot_product_attention(queries, k, v, attn_mask=mask, scale=scale)
    else:
        scores = torch.matmul(queries * scale, k.transpose(-1, -2))
        shares = torch.softmax(scores.masked_fill_(~mask, float("-inf")), -1, dtype=torch.float32)
        mixed = torch.matmul(shares.to(v.dtype), v)
    return mixed.reshape(n, -1, q.shape[-1])[decode.rows]


def _decode_mask(decode: _Decode, window: int | None) -> Tensor:
    if window not in decode.masks:
        columns = torch.arange(decode.capacity, device=decode.positions.device)
        last = decode.positions[:, None]
        allowed = columns <= last
        if window is not None:
            allowed &= columns > last - window
        decode.masks[window] = allowed[:, None, None]
    return decode.masks[window]


def _prefill(
    q: Tensor, keys: Tensor, values: Tensor, chunk: _Chunk, scale: float, window: int | None
) -> Tensor:
    """[count, heads, head_dim] of one chunk, which reads its own row."""
    span = chunk.span
    k, v = (cache[_row(span).index, :, : span.end][None] for cache in (keys, values))
    if q.device.type != "cpu":
        return _prefill_in_tiles(q, k, v, chunk, scale, window)
    mask = _chunk_mask(chunk, window, q.device)
    mixed = scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k,
        v,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != keys.shape[1],
    )
    return mixed[0].transpose(0, 1)


def _prefill_in_tiles(
    q: Tensor, k: Tensor, v: Tensor, chunk: _Chunk, scale: float, window: int | None
) -> Tensor:
    """The same on a GPU, where grouped heads with a mask have no kernel that keeps no scores: the query
    heads that share a key head are more queries."""
    span, num_kv_heads, head_dim = chunk.span, k.shape[1], q.shape[-1]
    num_groups = q.shape[1] // num_kv_heads
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    columns = torch.arange(span.end, device=q.device)
    for first in range(0, len(q), QUERY_TILE):
        tile = q[first : first + QUERY_TILE]
        count = len(tile)
        rows = torch.arange(span.start + first, span.start + first + count, device=q.device)
        allowed = columns <= rows[:, None]
        if window is not None:
            allowed &= columns > rows[:, None] - window
        queries = tile.view(count, num_kv_heads, num_groups, head_dim).permute(1, 2, 0, 3)
        mixed = scaled_dot_product_attention(
            queries.reshape(1, num_kv_heads, num_groups * count, head_dim),
            k,
            v,
            attn_mask=allowed.repeat(num_groups, 1),
            scale=scale,
        )
        mixed = mixed.view(num_kv_heads, num_groups, count, head_dim).permute(2, 0, 1, 3)
        output[first : first + count] = mixed.reshape(count, -1, head_dim)
    return output


def _chunk_mask(chunk: _Chunk, window: int | None, device: torch.device) -> Tensor | None:
    """[count, end] bool, or None where plain causal masking is equal."""
    span = chunk.span
    if window is not None and span.end <= window:
        window = None
    if span.start == 0 and window is None:
        return None
    if window not in chunk.masks:
        rows = torch.arange(span.start, span.end, device=device)[:, None]
        columns = torch.arange(span.end, device=device)
        allowed = columns <= rows
        if window is not None:
            allowed &= columns > rows - window
        chunk.masks[window] = allowed
    return chunk.masks[window]
