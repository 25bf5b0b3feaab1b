"""A step is the same however it is cut, and equals a plain PyTorch loop."""

from __future__ import annotations

import math

import pytest
import torch

from headway.contracts.config.scheduling import SchedulingConfig
from tests.numeric.engines import (
    GRAD_NORM,
    IN_FLOAT64,
    OPTIMIZER,
    TRAINER,
    assert_close,
    open_engine,
    parameters_of,
    plain_training,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.float64 import float64_norms
from tests.numeric.models import load_reference
from trainer.api import LossOutput, MicroBatchSpec, Scheduling
from trainer.backends.heads import LogitsOutput

STEPS = 3


@pytest.fixture(scope="module")
def batches():
    return [random_batch(seed) for seed in range(STEPS)]


@pytest.fixture(scope="module")
def plain(llama_dir, batches):
    return plain_training(load_reference(llama_dir), batches)


def train(engine, batches, budget):
    metrics = []
    for batch in batches:
        metrics.append(
            engine.train_batch(batch, MicroBatchSpec(budget), token_loss, tokens_in_loss)
        )
        engine.step_lr_scheduler()
    return metrics


@pytest.mark.parametrize("budget", [17, 25, 40, 10_000])
def test_any_micro_batch_split_equals_the_plain_loop(llama_dir, batches, plain, budget):
    engine = open_engine(llama_dir)
    before = parameters_of(engine)
    metrics = train(engine, batches, budget)
    assert [f["loss"] for f in metrics] == pytest.approx(plain["losses"], rel=1e-5)
    assert [f["grad_norm"] for f in metrics] == pytest.approx(plain["norms"], rel=GRAD_NORM)
    assert min(plain["norms"]) < OPTIMIZER.max_grad_norm < max(plain["norms"])  # some are clipped
    assert_close(parameters_of(engine), plain["parameters"], atol=1e-6)
    moved = max((before[n] - p).abs().max().item() for n, p in plain["parameters"].items())
    assert moved > OPTIMIZER.lr


@pytest.mark.parametrize("budget", [17, 25])
def test_in_float64_any_split_has_the_numbers_of_the_whole(llama_dir, batches, budget):
    with float64_norms():
        cut, whole = (open_engine(llama_dir, in_float64=True) for _ in range(2))
        metrics = [train(cut, batches, budget), train(whole, batches, 10_000)]
    for got, expected in zip(*metrics, strict=True):
        assert got == pytest.approx(expected, rel=IN_FLOAT64, abs=IN_FLOAT64)
    assert_close(parameters_of(cut), parameters_of(whole), atol=IN_FLOAT64)


def test_gradient_checkpointing_recomputes_and_changes_no_number(llama_dir, batches, plain):
    engine = open_engine(llama_dir, gradient_checkpointing=True)
    passes = []
    engine._model.model.model.layers[0].self_attn.register_forward_hook(lambda *_: passes.append(1))
    metrics = train(engine, batches, 10_000)
    assert len(passes) == 2 * STEPS
    assert [f["grad_norm"] for f in metrics] == pytest.approx(plain["norms"], rel=GRAD_NORM)
    assert_close(parameters_of(engine), plain["parameters"], atol=1e-6)


@pytest.mark.parametrize("budget", [17, 10_000])
def test_figures_are_means_over_all_masked_tokens(llama_dir, batches, budget):
    engine = open_engine(llama_dir)
    logits = engine.forward(batches[0], MicroBatchSpec(10_000))
    whole = token_loss(LogitsOutput(logits, batches[0]), batches[0])
    metrics = train(engine, batches[:1], budget)[0]
    for name, value in whole.stats.items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-4, abs=1e-6)
    assert metrics["lr"] == OPTIMIZER.lr


def test_eval_batch_is_the_loss_of_the_next_train_batch_and_moves_nothing(llama_dir, batches):
    engine = open_engine(llama_dir)
    before = parameters_of(engine)
    loss = engine.eval_batch(batches[0], MicroBatchSpec(20), token_loss, tokens_in_loss)
    assert_close(parameters_of(engine), before, atol=0.0)
    metrics = train(engine, batches[:1], 20)[0]
    assert loss.item() == pytest.approx(metrics["loss"], rel=1e-6)


def test_a_gradient_that_is_not_finite_skips_the_step(llama_dir, batches):
    engine = open_engine(llama_dir)
    before = parameters_of(engine)

    def broken(output, batch):
        return LossOutput(token_loss(output, batch).loss * math.nan)

    metrics = engine.train_batch(batches[0], MicroBatchSpec(40), broken, tokens_in_loss)
    assert metrics["skipped_steps"] == 1.0
    assert math.isnan(metrics["grad_norm"])
    assert_close(parameters_of(engine), before, atol=0.0)
    train(engine, batches[:1], 40)  # and the next step starts from clean gradients
    assert all(torch.isfinite(p).all() for p in parameters_of(engine).values())


def test_a_batch_without_tokens_in_the_loss_has_loss_zero(llama_dir):
    batch = random_batch(0)
    batch = batch.with_columns(loss_mask=torch.zeros(batch.num_tokens, dtype=torch.bool))
    metrics = train(open_engine(llama_dir), [batch], 20)[0]
    assert metrics["loss"] == 0.0
    assert metrics["grad_norm"] == 0.0


def test_a_rank_asks_a_launcher_for_its_threads_and_leaves_the_rest_to_it(llama_dir):
    trainer = TRAINER.model_copy(update={"num_threads": 3})
    wanted = open_engine(llama_dir, trainer=trainer).get_scheduling_config()
    assert wanted == Scheduling(cpu=3, gpu=0)
    assert (wanted.partition, wanted.time_limit, wanted.env_vars) == (None, None, {})


def test_a_rank_asks_a_launcher_for_what_the_configuration_names(llama_dir):
    asked = {"cpu": 2, "gpu": 1, "mem": 4096, "partition": "long", "time_limit": "1-00:00:00"}
    scheduling = SchedulingConfig(**asked, env_vars={"A": "b"}, nodes=2)
    trainer = TRAINER.model_copy(update={"scheduling": scheduling})
    wanted = open_engine(llama_dir, trainer=trainer).get_scheduling_config()
    assert wanted == Scheduling(**asked, env_vars={"A": "b"})
