"""Attention of one step over the KV cache, behind transformers' attention interface.

A step packs the next tokens of many sequences into one row `[1, T]`: the last token of each sequence
that decodes, and chunks of prompts. Every layer but attention works on tokens alone. Attention
writes the new keys and values into the sequences' rows, then reads: all decoding rows of a slab in
one batched product, each chunk on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from headway.contracts.errors import ConfigError
from inference_server.backends.embedded.kv_cache import Row, Slab

NAME = "headway_rows"


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `[start, end)` of the sequence in `row`, at `[first, first + end - start)` of the step."""

    row: Row
    start: int
    end: int
    first: int


@dataclass(slots=True)
class _Chunk:
    span: Span
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Decode:
    """The running rows of a slab, of which some have one token in this step."""

    queries: Tensor
    """[n] position in the step of each row's token (0 for rows without one)."""
    positions: Tensor
    """[n] position of that token in its sequence (0 for rows without one)."""
    rows: Tensor
    """[m] the rows that have one."""
    outputs: Tensor
    """[m] where their results go in the step."""
    capacity: int
    """How far the rows are read: whole, because a product over contiguous rows is faster than one
    over fewer positions of each (1.8 against 5.2 ms for 128 rows, 160 positions, bfloat16)."""
    masks: dict[int | None, Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class _SlabWork:
    """What a step does in one slab."""

    slab: Slab
    tokens: Tensor
    """[S] positions in the step of the tokens that are written here."""
    places: Tensor
    """[S · kv_heads] where their heads go in the slab seen as [rows · kv_heads · capacity, head_dim]."""
    decode: _Decode | None
    chunks: list[_Chunk]


class Step:
    """Where the tokens of one forward lie in the cache; made once, used by every layer."""

    def __init__(self, spans: Sequence[Span], num_kv_heads: int, device: torch.device) -> None:
        self._device = device
        by_slab: dict[int, list[Span]] = {}
        for span in spans:
            by_slab.setdefault(id(span.row.slab), []).append(span)
        self.works = [self._work(group, num_kv_heads) for group in by_slab.values()]

    def _work(self, spans: list[Span], num_kv_heads: int) -> _SlabWork:
        slab = spans[0].row.slab
        tokens: list[int] = []
        rows: list[int] = []
        positions: list[int] = []
        for span in spans:
            count = span.end - span.start
            tokens.extend(range(span.first, span.first + count))
            rows.extend([span.row.index] * count)
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
            queries[span.row.index] = span.first
            positions[span.row.index] = span.start
        return _Decode(
            queries=self._tensor(queries),
            positions=self._tensor(positions),
            rows=self._tensor([span.row.index for span in singles]),
            outputs=self._tensor([span.first for span in singles]),
            capacity=slab.capacity,
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self._device)


def slab_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    step: Step | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Args:
        query: [1, heads, T, head_dim]; key, value: [1, kv_heads, T, head_dim].
        attention_mask: not used.
        step: given to the model's forward by the engine.
        sliding_window: a query reads this many positions, its own included; None reads all.
    Returns:
        [1, T, heads, head_dim].
    Raises:
        ConfigError: the model wants a kind of attention that is not built here.
    """
    if step is None or softcap is not None or s_aux is not None:
        raise ConfigError(
            f"{type(module).__name__} does not fit the embedded torch backend (step passed on: "
            f"{step is not None}, softcap: {softcap}, sinks: {s_aux is not None}); "
            "use backend.type: sglang"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, heads, head_dim]
    output = torch.empty_like(q, memory_format=torch.contiguous_format)
    for work in step.works:
        keys, values = work.slab.keys[layer], work.slab.values[layer]
        head_dim = q.shape[-1]
        for cache, new in ((keys, k), (values, v)):
            chosen = new[work.tokens].reshape(-1, head_dim)
            cache.view(-1, head_dim).index_copy_(0, work.places, chosen.to(cache.dtype))
        if work.decode is not None:
            decoded = _decode(q, keys, values, work.decode, scale, sliding_window)
            output.index_copy_(0, work.decode.outputs, decoded)
        for chunk in work.chunks:
            span = chunk.span
            place = slice(span.first, span.first + span.end - span.start)
            output[place] = _prefill(q[place], keys, values, chunk, scale, sliding_window)
    return output[None], None


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
    if q.is_cuda:
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
    k, v = (cache[span.row.index, :, : span.end][None] for cache in (keys, values))
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


def _chunk_mask(chunk: _Chunk, window: int | None, device: torch.device) -> Tensor | None:
    """[count, end] bool, or None where plain causal masking says the same."""
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


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The cache knows what each query may read."""


def register() -> None:
    """Make the name known to transformers."""
    AttentionInterface.register(NAME, slab_attention)
    AttentionMaskInterface.register(NAME, _no_mask)
