"""Both ways to lay out keys and values against one dense attention in float64 that knows neither."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from inference_server.backends.embedded import slab_decode
from inference_server.backends.embedded.attention import Span, StepTokens
from inference_server.backends.embedded.device import Device
from inference_server.backends.embedded.kv_cache import KVCache, KVShape
from inference_server.backends.embedded.paged_attention import PagedStep, padded, paged_inputs
from inference_server.backends.embedded.paged_cache import BLOCK_SIZE, PagedCache
from inference_server.backends.embedded.slab_attention import (
    QUERY_TILE,
    SlabStep,
    _Chunk,
    _prefill_in_tiles,
)
from inference_server.backends.embedded.slab_cache import SlabCache
from tests.numeric import paged

LAYERS, HEADS, KV_HEADS, DIM, CONTEXT = 2, 6, 2, 8, 900
SHAPE = KVShape(LAYERS, KV_HEADS, DIM, torch.float32, torch.device("cpu"))
ROOM = 40 * BLOCK_SIZE * SHAPE.token_bytes
LENGTHS = ([1, 255, 256, 257, 511, 513], [0, 300, 1, 700], [256, 512, 0])
"""Tokens that lie in the cache before the step; those with none begin with a chunk."""


def step_of(cache: KVCache, spans: list[Span], size: int | None = None):
    count = sum(span.end - span.start for span in spans)
    if isinstance(cache, SlabCache):
        return SlabStep(spans, KV_HEADS, Device().where), count
    positions = [p for span in spans for p in range(span.start, span.end)]
    inputs = paged_inputs(StepTokens(range(count), positions, range(count), spans, []))
    if size is not None:
        inputs = padded(inputs, size)
    max_q, max_k = (max(s.end - s.start for s in spans), max(s.end for s in spans))
    return PagedStep(cache.store, inputs, varlen_attn, max_q, max_k), size or count


def dense(q, k, v, start, window):
    """[T, heads, DIM] of one sequence whose first `start` tokens have no query."""
    k, v = (part.double().repeat_interleave(HEADS // KV_HEADS, dim=1) for part in (k, v))
    output = torch.empty(len(q), HEADS, DIM, dtype=torch.float64)
    for index, query in enumerate(q.double()):
        last = start + index
        first = 0 if window is None else max(0, last - window + 1)
        scores = (k[first : last + 1] * query).sum(-1) * 0.3
        shares = torch.softmax(scores, dim=0)
        output[index] = (shares[..., None] * v[first : last + 1]).sum(0)
    return output


def play(cache: KVCache, lengths: list[int], window: int | None, size: int | None = None) -> None:
    """Fill rows in a first step, then decode some and go on with chunks of others, in every layer."""
    rng = random.Random(sum(lengths))
    torch.manual_seed(sum(lengths))
    rows = [cache.allocate(CONTEXT - 1) for _ in lengths]
    rng.shuffle(rows)  # blocks and slots in no order
    held: list = [[torch.zeros(2, 0, KV_HEADS, DIM) for _ in range(LAYERS)] for _ in lengths]
    chunks = [rng.choice([1, 40, 90]) if length == 0 else 1 for length in lengths]
    for counts in (lengths, chunks if size is None else [1] * len(lengths)):
        spans, first, owners = [], 0, []
        for owner, (row, count) in enumerate(zip(rows, counts, strict=True)):
            if count:
                spans.append(Span(row, row.length, row.length + count, first))
                owners.append(owner)
                first += count
        step, total = step_of(cache, spans, size if counts is not lengths else None)
        for layer in range(LAYERS):
            q = torch.randn(total, HEADS, DIM)
            k, v = torch.randn(2, total, KV_HEADS, DIM)
            got = step.attend(layer, q, k, v, 0.3, window)
            for owner, span in zip(owners, spans, strict=True):
                place = slice(span.first, span.first + span.end - span.start)
                new = torch.stack([k[place], v[place]])
                held[owner][layer] = torch.cat([held[owner][layer], new], dim=1)
                expected = dense(q[place], *held[owner][layer], span.start, window)
                torch.testing.assert_close(got[place].double(), expected, atol=2e-6, rtol=1e-5)
        for span in spans:
            span.row.length = span.end


@pytest.mark.parametrize("window", [None, 24, 300])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("kind", ["slabs", "blocks"])
def test_a_step_reads_what_each_query_may_read(kind, lengths, window):
    if kind == "slabs":
        play(SlabCache(SHAPE, CONTEXT, ROOM), lengths, window)
    else:
        play(PagedCache(SHAPE, CONTEXT, lambda: ROOM), lengths, window)


@pytest.mark.parametrize("small", [0, 1 << 30])
@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_16_bits_by_either_kernel(dtype, window, small, monkeypatch):
    monkeypatch.setattr(slab_decode, "SMALL", small)
    torch.manual_seed(0)
    cache = SlabCache(replace(SHAPE, num_layers=1, dtype=dtype), CONTEXT, ROOM)
    lengths = [70, 66, 5, 300]
    rows = [cache.allocate(length + 1) for length in lengths]
    for row in rows:
        row.slab.store.normal_()
    spans = [Span(row, length, length + 1, 0) for row, length in zip(rows, lengths, strict=True)]
    order = slab_decode.decode_order(spans)
    q = torch.randn(len(rows), HEADS, DIM).to(dtype)
    k, v = torch.randn(2, len(rows), KV_HEADS, DIM).to(dtype)
    got = slab_decode.SlabDecodeStep([spans[at] for at in order]).attend(0, q, k, v, 0.3, window)
    for place, at in enumerate(order):
        row, length = rows[at], lengths[at]
        keys, values = (
            held[0, row.index, :, : length + 1].transpose(0, 1).float()
            for held in (row.slab.keys, row.slab.values)
        )
        assert torch.equal(keys[-1], k[place].float())
        expected = dense(q[place : place + 1].float(), keys, values, length, window)
        torch.testing.assert_close(got[place : place + 1].double(), expected, atol=0.03, rtol=0.03)


def test_rows_that_fill_up_a_batch_change_nothing():
    paged.CALLS.clear()
    play(PagedCache(SHAPE, CONTEXT, lambda: ROOM), [1, 300, 256], None, size=8)
    assert paged.CALLS[-1][0] == (8, HEADS, DIM)


def test_a_step_is_one_call_per_layer_in_a_shape_without_the_lengths():
    cache = PagedCache(SHAPE, CONTEXT, lambda: ROOM)
    paged.CALLS.clear()
    play(cache, [70, 5, 120], None, size=4)
    short = set(paged.CALLS[-LAYERS:])
    play(cache, [200, 250, 140], None, size=4)
    assert set(paged.CALLS[-LAYERS:]) == short
    assert len(paged.CALLS) == 4 * LAYERS


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("start", "end"), [(0, 10), (0, QUERY_TILE + 44), (150, 2 * QUERY_TILE)])
def test_a_chunk_on_a_gpu_without_flash_attention_is_read_tile_by_tile(start, end, window):
    torch.manual_seed(end)
    q = torch.randn(end - start, HEADS, DIM)
    k, v = torch.randn(2, 1, KV_HEADS, end, DIM)
    row = SlabCache(SHAPE, CONTEXT, ROOM).allocate(end)
    got = _prefill_in_tiles(q, k, v, _Chunk(Span(row, start, end, 0)), 0.3, window)
    expected = dense(q, k[0].transpose(0, 1), v[0].transpose(0, 1), start, window)
    torch.testing.assert_close(got.double(), expected, atol=2e-6, rtol=1e-5)
