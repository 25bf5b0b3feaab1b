"""Packed sequences give what each gives alone."""

from __future__ import annotations

import pytest
import torch

from headway.contracts.errors import DataError
from tests.numeric.engines import LENGTHS, open_engine, random_batch
from tests.numeric.models import load_reference, reference_logits
from trainer.api import MicroBatchSpec


@torch.no_grad()
def one_by_one(model: torch.nn.Module, batch) -> torch.Tensor:
    pieces = [batch.select([i])["input_ids"].tolist() for i in range(len(batch.lengths))]
    return torch.cat([reference_logits(model, ids) for ids in pieces])


@pytest.mark.parametrize("budget", [17, 30, 10_000])
def test_forward_on_packed_sequences_equals_each_alone(model_dir, budget):
    batch = random_batch(0)
    got = open_engine(model_dir).forward(batch, MicroBatchSpec(budget))
    expected = one_by_one(load_reference(model_dir), batch)
    errors = (got - expected).abs()
    assert expected.abs().max() > 1.0  # the comparison means something
    assert errors.max() < 5e-5
    assert errors.mean() < 5e-6


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (16, 1, 15, 17, 1, 32, 33, 8), (64,)])
def test_any_mix_of_lengths_packs(llama_dir, lengths):
    batch = random_batch(5, lengths)
    got = open_engine(llama_dir).forward(batch, MicroBatchSpec(10_000))
    assert (got - one_by_one(load_reference(llama_dir), batch)).abs().max() < 5e-5


def test_eager_attention_packs_as_well(llama_dir):
    batch = random_batch(1)
    engine = open_engine(llama_dir, attn_implementation="eager")
    got = engine.forward(batch, MicroBatchSpec(10_000))
    errors = (got - one_by_one(load_reference(llama_dir), batch)).abs()
    assert errors.max() < 5e-5
    assert errors.mean() < 5e-6


@torch.no_grad()
def test_with_a_cache_transformers_does_not_cut_packed_sequences(llama_dir):
    """Why every forward of the trainer says use_cache=False."""
    batch = random_batch(2)
    model = load_reference(llama_dir)
    packed = {
        "input_ids": batch["input_ids"][None],
        "position_ids": batch.position_ids[None],
    }
    alone = one_by_one(model, batch)
    uncached = model(**packed, use_cache=False).logits[0]
    cached = model(**packed, use_cache=True).logits[0]
    assert (uncached - alone).abs().max() < 5e-5
    assert (cached - alone).abs().max() > 0.1
    first = LENGTHS[0]
    torch.testing.assert_close(cached[:first], alone[:first], atol=5e-5, rtol=0)


def test_hook_sees_each_micro_batch_and_results_keep_the_order(llama_dir):
    batch = random_batch(3)
    engine = open_engine(llama_dir)

    def logprobs(output, micro_batch):
        return output.logprobs(micro_batch["labels"])

    together = engine.forward(batch, MicroBatchSpec(10_000), post_hook=logprobs)
    apart = engine.forward(batch, MicroBatchSpec(17), post_hook=logprobs, aggregate_fn=list)
    assert [piece.shape[0] for piece in apart] == list(LENGTHS)
    torch.testing.assert_close(torch.cat(apart), together, atol=2e-5, rtol=0)


def test_results_of_other_lengths_are_cut_by_output_seqlens(llama_dir):
    batch = random_batch(4)
    engine = open_engine(llama_dir)

    def last_only(output, micro_batch):
        return output.logits()[torch.tensor(micro_batch.lengths).cumsum(0) - 1]

    ones = [1] * len(LENGTHS)
    got = engine.forward(batch, MicroBatchSpec(20), ones, last_only)
    expected = engine.forward(batch, MicroBatchSpec(20))[torch.tensor(LENGTHS).cumsum(0) - 1]
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_a_sequence_above_the_budget_is_an_error(llama_dir):
    with pytest.raises(DataError, match="17 tokens exceeds the micro-batch budget of 16"):
        open_engine(llama_dir).forward(random_batch(0), MicroBatchSpec(16))
