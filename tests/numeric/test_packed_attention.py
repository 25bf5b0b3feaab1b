"""Both ways of attending within the sequences of a pack equal a slow loop, forward and backward."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from headway.contracts.config.model import LoraConfig
from tests import varlen_double
from tests.numeric.engines import (
    IN_FLOAT64,
    assert_close,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.float64 import float64_norms
from trainer.api import MicroBatchSpec
from trainer.backends import packed_attention
from trainer.backends.packed_attention import PackedLayout, in_buckets, in_one_call, takes_varlen

HEAD_DIM = 8
LENGTHS = [(1,), (1, 1, 1), (64,), (5, 1, 9, 9, 2, 33, 16, 17, 1)]


@pytest.fixture(autouse=True)
def kernel() -> None:
    varlen_double.install()


def columns(seed: int, size: int, heads: int, kv_heads: int) -> list[Tensor]:
    """[T, heads, head_dim] of query, key and value, strided as a model's projections leave them."""
    generator = torch.Generator().manual_seed(seed)

    def column(count: int) -> Tensor:
        shape = (1, count, size, HEAD_DIM)
        return torch.randn(shape, generator=generator, dtype=torch.float64)[0].transpose(0, 1)

    return [column(heads).requires_grad_(), *(column(kv_heads).requires_grad_() for _ in range(2))]


def slow(query: Tensor, key: Tensor, value: Tensor, lengths, scale: float) -> Tensor:
    """One position and head at a time."""
    rows, start = [], 0
    group = query.shape[1] // key.shape[1]
    for length in lengths:
        for at in range(start, start + length):
            heads = []
            for head in range(query.shape[1]):
                seen = slice(start, at + 1)
                scores = key[seen, head // group] @ query[at, head] * scale
                heads.append(torch.softmax(scores, 0) @ value[seen, head // group])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("attend", [in_buckets, in_one_call])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_values_and_gradients_equal_those_of_a_slow_loop(attend, heads, kv_heads, lengths, scale):
    given = columns(0, sum(lengths), heads, kv_heads)
    layout = PackedLayout(lengths, torch.device("cpu"))
    factor = 1.0 / math.sqrt(HEAD_DIM) if scale is None else scale
    slopes = torch.randn_like(given[0])
    results = []
    for output in (attend(*given, layout, scale), slow(*given, lengths, factor)):
        results.append([output, *torch.autograd.grad((output * slopes).sum(), given)])
    for got, expected in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)


def test_one_call_serves_any_number_of_sequences():
    for lengths in ((60,), (10,) * 6, (*range(1, 11), 5)):
        varlen_double.CALLS.clear()
        in_one_call(*columns(1, 60, 4, 2), PackedLayout(lengths, torch.device("cpu")), scaling=None)
        (call,) = varlen_double.CALLS
        assert call == ((60, 4, HEAD_DIM), len(lengths))


def test_a_cpu_keeps_its_buckets():
    assert not any(
        takes_varlen(torch.zeros(2, 2, 8, dtype=d)) for d in (torch.bfloat16, torch.float)
    )


@pytest.mark.parametrize(
    "model",
    [{}, {"gradient_checkpointing": True}, {"lora": LoraConfig(rank=2)}],
    ids=["whole", "recomputed", "lora"],
)
def test_training_is_the_same_both_ways(llama_dir, monkeypatch, model):
    """The layout reaches every layer, and what is recomputed in the backward pass, too."""
    engines = []
    with float64_norms(True):
        for is_varlen in (False, True):
            monkeypatch.setattr(packed_attention, "takes_varlen", lambda query, it=is_varlen: it)
            varlen_double.CALLS.clear()
            engine = open_engine(llama_dir, in_float64=True, **model)
            metrics = [
                engine.train_batch(random_batch(n), MicroBatchSpec(25), token_loss, tokens_in_loss)
                for n in range(2)
            ]
            assert bool(varlen_double.CALLS) is is_varlen
            engines.append((metrics, parameters_of(engine)))
    (expected, parameters), (got, others) = engines
    for one, other in zip(got, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-9, abs=1e-9)
    assert_close(others, parameters, atol=IN_FLOAT64)
