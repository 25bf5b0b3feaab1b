"""Models with a scalar head: critics and reward models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from headway.contracts.errors import ConfigError
from tests.numeric.engines import (
    GRAD_NORM,
    assert_close,
    assert_same_figures,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.models import load_reference, save_model
from tests.numeric.ranks import run_ranks
from trainer.api import LossOutput, MicroBatchSpec, SaveLoadMeta
from trainer.batching.balance import partition_by_tokens
from trainer.interfaces.reward_modeling import score_sequences
from trainer.topology import Topology

SPEC = MicroBatchSpec(25)
STEPS = 3


def open_critic(folder: Path, **options):
    return open_engine(folder, head="value", **options)


def values_of(engine, batch) -> torch.Tensor:
    return engine.forward(batch, SPEC, post_hook=lambda output, _: output.values())


def value_loss(output, batch) -> LossOutput:
    errors = (output.values() - batch["advantages"]).square()
    loss = torch.where(batch["loss_mask"], errors, 0.0).sum() / batch["loss_mask"].sum()
    return LossOutput(loss)


def train(engine, steps, share=lambda batch: batch):
    metrics = []
    for seed in steps:
        mine = share(random_batch(seed))
        metrics.append(engine.train_batch(mine, SPEC, value_loss, tokens_in_loss))
        engine.step_lr_scheduler()
    return metrics


def test_values_are_the_head_on_each_sequence_alone(model_dir):
    batch = random_batch(0)
    engine = open_critic(model_dir)
    body = load_reference(model_dir).base_model
    weight = parameters_of(engine)["score.weight"].double()
    expected = []
    with torch.no_grad():
        for ids in torch.split(batch["input_ids"], list(batch.lengths)):
            hidden = body(input_ids=ids[None], use_cache=False).last_hidden_state[0]
            expected.append((hidden.double() @ weight.T)[:, 0])
    got = values_of(engine, batch)
    assert got.dtype == torch.float32
    assert got.abs().max() > 0.1
    torch.testing.assert_close(got, torch.cat(expected).float(), atol=2e-5, rtol=0)
    assert torch.equal(engine.forward(batch, SPEC), got)  # what it gives unless told


def test_a_fresh_head_follows_from_the_seed_and_the_body_is_the_stored_one(llama_dir):
    one, same, other = (parameters_of(open_critic(llama_dir, seed=seed)) for seed in (5, 5, 6))
    assert_close(same, one, atol=0.0)
    different = {name for name in one if not torch.equal(one[name], other[name])}
    assert different == {"score.weight"}
    stored = parameters_of(open_engine(llama_dir))
    assert one.keys() - stored.keys() == {"score.weight"}
    assert all(torch.equal(one[name], stored[name]) for name in one.keys() & stored.keys())


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_exported_critic_is_a_reward_model_for_transformers_and_for_us(tmp_path, kind):
    engine = open_critic(save_model(tmp_path / "source", kind))
    train(engine, range(1))
    engine.save(SaveLoadMeta(str(tmp_path / "out"), weight_format="hf"))
    assert_close(parameters_of(open_critic(tmp_path / "out")), parameters_of(engine), atol=0.0)

    batch = random_batch(7)
    ones = [1] * len(batch.lengths)
    got = engine.forward(batch, SPEC, ones, score_sequences)
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        pieces = torch.split(batch["input_ids"], list(batch.lengths))
        expected = torch.cat([judge(ids[None], use_cache=False).logits[0] for ids in pieces])
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


def test_a_resumed_critic_goes_on_bit_for_bit(llama_dir, tmp_path):
    uninterrupted = open_critic(llama_dir)
    train(uninterrupted, range(4))
    first = open_critic(llama_dir)
    train(first, range(2))
    first.save(SaveLoadMeta(str(tmp_path / "saved")))
    resumed = open_critic(llama_dir, seed=99)  # another fresh head, which the checkpoint replaces
    resumed.load(SaveLoadMeta(str(tmp_path / "saved")))
    train(resumed, range(2, 4))
    assert_close(parameters_of(resumed), parameters_of(uninterrupted), atol=0.0)


@pytest.mark.parametrize(("stored", "wanted"), [("lm", "value"), ("value", "lm")])
def test_a_checkpoint_with_another_head_is_refused_and_changes_nothing(
    llama_dir, tmp_path, stored, wanted
):
    open_engine(llama_dir, head=stored).save(SaveLoadMeta(str(tmp_path / "saved")))
    engine = open_engine(llama_dir, head=wanted)
    before = parameters_of(engine)
    with pytest.raises(ConfigError, match="does not fit the model"):
        engine.load(SaveLoadMeta(str(tmp_path / "saved")))
    assert_close(parameters_of(engine), before, atol=0.0)


def test_a_directory_without_the_head_that_predicts_tokens_is_refused(llama_dir, tmp_path):
    open_critic(llama_dir).save(SaveLoadMeta(str(tmp_path / "critic"), weight_format="hf"))
    with pytest.raises(ConfigError, match=r"does not hold lm_head\.weight"):
        open_engine(tmp_path / "critic")


def test_a_critic_says_nothing_of_tokens(llama_dir):
    with pytest.raises(ConfigError, match=r"model\.head=lm"):
        open_critic(llama_dir).train_batch(random_batch(0), SPEC, token_loss, tokens_in_loss)


def train_rank(topology: Topology, folder: Path):
    engine = open_critic(folder, topology=topology)

    def share(batch):
        return batch.select(partition_by_tokens(batch.lengths, topology.world_size)[topology.rank])

    metrics = train(engine, range(STEPS), share)
    return metrics, parameters_of(engine)


@pytest.mark.extended
def test_a_critic_on_two_ranks_trains_as_on_one(llama_dir, tmp_path):
    expected, parameters = train_rank(Topology(0, 1, torch.device("cpu")), llama_dir)
    for metrics, got in run_ranks(2, tmp_path, train_rank, llama_dir):
        for one, two in zip(expected, metrics, strict=True):
            assert_same_figures(two, one, grad_norm=GRAD_NORM)
        assert_close(got, parameters, atol=1e-6)
