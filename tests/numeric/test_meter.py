"""Operations, padding and speed of a step, against counters and slow loops, on one rank and on two."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.model import LoraConfig, TrainedModelConfig
from tests.numeric.engines import (
    assert_close,
    open_engine,
    parameters_of,
    random_batch,
    token_loss,
    tokens_in_loss,
)
from tests.numeric.models import save_model
from tests.numeric.policies import batch_of, experiment, open_models
from tests.numeric.ranks import run_ranks
from trainer.api import MicroBatchSpec
from trainer.batching.balance import partition_by_tokens
from trainer.batching.packing import pack_by_tokens
from trainer.meter import Meter
from trainer.model_cost import model_cost, peak_flops, tflops_of
from trainer.topology import Topology

BUDGET, PEAK_TFLOPS, TRAIN_S = 20, 1e-3, 2.0
CPU = torch.device("cpu")
ALONE = Topology(0, 1, CPU)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_operations_are_those_that_a_counter_sees(tmp_path, kind):
    """PyTorch's counter sees products only; our N has a few vectors of norms and biases besides.

    It counts plain products of attention, and not what a fused kernel does on a CPU.
    """
    folder, lengths = save_model(tmp_path / kind, kind), [40, 7]
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    cost = model_cost(TrainedModelConfig(path=str(folder)))
    with FlopCounterMode(display=False) as forward:
        outputs = [model(torch.zeros(1, size, dtype=torch.int64)).logits.sum() for size in lengths]
    assert cost.forward_flops(lengths) == pytest.approx(forward.get_total_flops(), rel=0.03)
    with FlopCounterMode(display=False) as backward:
        sum(outputs).backward()
    counted = forward.get_total_flops() + backward.get_total_flops()
    assert cost.training_flops(lengths) == pytest.approx(counted, rel=0.03)


def test_the_formula_is_that_of_palm(tmp_path):
    """(6·N + 12·L·H·Q·T) per token: llama with 2 layers of 4 heads of 8, written out by hand."""
    cost = model_cost(TrainedModelConfig(path=str(save_model(tmp_path / "llama", "llama"))))
    hidden, middle, words, layers = 32, 48, 61, 2
    attention = hidden * hidden * 2 + hidden * hidden // 2 * 2
    layer = attention + 3 * hidden * middle + 2 * hidden
    parameters = layers * layer + hidden + words * hidden
    assert cost.parameters == parameters
    expected = math.fsum(
        6 * parameters + 12 * layers * 4 * 8 * size for size in (5, 11) for _ in range(size)
    )
    assert cost.training_flops([5, 11]) == expected
    assert cost.forward_flops([5, 11]) == expected / 3


def test_frozen_parameters_have_no_gradient_and_a_value_head_no_vocabulary(tmp_path):
    folder = str(save_model(tmp_path / "llama", "llama"))
    whole = model_cost(TrainedModelConfig(path=folder))
    adapted = model_cost(TrainedModelConfig(path=folder, lora=LoraConfig()))
    attention = 12 * 2 * 4 * 8 * 9**2
    assert adapted.training_flops([9]) - attention == 4 * whole.parameters * 9
    critic = model_cost(TrainedModelConfig(path=folder, head="value"))
    assert whole.parameters - critic.parameters == 61 * 32


def test_the_peak_is_as_configured_or_from_the_table():
    assert peak_flops(None, CPU) is None
    assert peak_flops(2.5, CPU) == 2.5e12
    assert tflops_of("NVIDIA H200") == tflops_of("NVIDIA H100 80GB HBM3") == 989.4
    assert tflops_of("NVIDIA H100 PCIe") == 756.0
    assert tflops_of("NVIDIA H20") == 148.0
    assert tflops_of("NVIDIA GeForce GTX 1080") is None


def step_figures(topology: Topology, folder: str) -> dict[str, float]:
    """A proximal forward and an optimizer step on this rank's share, metered."""
    meter = Meter(MetricsConfig(peak_tflops=PEAK_TFLOPS), topology)
    model = TrainedModelConfig(path=folder)
    engine = meter.around(open_engine(folder, topology=topology), model)
    batch = random_batch(0)
    share = batch.select(partition_by_tokens(batch.lengths, topology.world_size)[topology.rank])
    spec = MicroBatchSpec(BUDGET)
    engine.forward(share, spec, post_hook=lambda out, b: out.logprobs(b["labels"]))
    engine.train_batch(share, spec, token_loss, tokens_in_loss)
    metrics = meter.take(batch.num_tokens, 1.0, TRAIN_S, 1.0)
    meter.begin()
    assert meter.take(batch.num_tokens, 1.0, TRAIN_S, 1.0)["mfu"] == 0.0, "a step begins at nothing"
    return metrics


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_is_metered_over_all_ranks(llama_dir, tmp_path, world_size):
    if world_size == 1:
        ranks = [step_figures(ALONE, str(llama_dir))]
    else:
        ranks = run_ranks(world_size, tmp_path / "ranks", step_figures, str(llama_dir))
    batch = random_batch(0)
    cost = model_cost(TrainedModelConfig(path=str(llama_dir)))
    shares = partition_by_tokens(batch.lengths, world_size)
    bins = [pack_by_tokens([batch.lengths[i] for i in share], BUDGET) for share in shares]
    passes = max(map(len, bins))
    repeated = sum(
        (passes - len(own)) * sum(batch.lengths[share[i]] for i in own[-1])
        for own, share in zip(bins, shares, strict=True)
    )
    tokens = batch.num_tokens
    flops = cost.training_flops(batch.lengths) + cost.forward_flops(batch.lengths)
    expected = {
        "wait_s": 1.0,
        "train_s": TRAIN_S,
        "publish_s": 1.0,
        "idle_share": 0.25,
        "train_tokens_per_s": tokens / TRAIN_S,
        "train_tokens_per_s_per_rank": tokens / TRAIN_S / world_size,
        "mfu": flops / (TRAIN_S * PEAK_TFLOPS * 1e12 * world_size),
        "padding_share": repeated / (tokens + repeated),
        "micro_batch_fill": tokens / (world_size * passes * BUDGET),
    }
    for metrics in ranks:
        assert 10e6 < metrics.pop("peak_memory_bytes") < 10e9
        assert metrics == pytest.approx(expected)


def test_every_model_of_an_experiment_counts_with_its_own_size(llama_dir):
    """A policy of adapters, a critic without them, and a reference that is the bare policy."""
    model = {"path": str(llama_dir), "lora": {"rank": 2}}
    critic = {"path": str(llama_dir), "head": "value"}
    config = experiment(
        llama_dir,
        model=model,
        critic={"model": critic},
        algorithm={"kl_coef": 0.1},
        metrics={"peak_tflops": PEAK_TFLOPS},
    )
    models, rows = open_models(config), batch_of(0)
    models.learner.train_step(rows, version=0)
    lengths = [row.num_tokens for row in rows]
    policy, value = (model_cost(TrainedModelConfig.model_validate(m)) for m in (model, critic))
    flops = policy.forward_flops(lengths) + policy.training_flops(lengths)  # first as the reference
    flops += value.forward_flops(lengths) + value.training_flops(lengths)
    mfu = models.policy._meter.take(sum(lengths), 0.0, TRAIN_S, 0.0)["mfu"]
    assert mfu == pytest.approx(flops / (TRAIN_S * PEAK_TFLOPS * 1e12))


def test_without_a_known_device_there_is_no_mfu(llama_dir):
    meter = Meter(MetricsConfig(), ALONE)
    assert meter.take(10, 0.0, 1.0, 0.0)["mfu"] is None


def test_an_engine_is_the_same_behind_a_meter(llama_dir):
    plain = open_engine(llama_dir)
    metered = Meter(MetricsConfig(), ALONE).around(
        open_engine(llama_dir), TrainedModelConfig(path=str(llama_dir))
    )
    batch, spec = random_batch(0), MicroBatchSpec(BUDGET)
    expected, got = (
        (
            engine.forward(batch, spec),
            engine.eval_batch(batch, spec, token_loss, tokens_in_loss),
            engine.train_batch(batch, spec, token_loss, tokens_in_loss),
        )
        for engine in (plain, metered)
    )
    torch.testing.assert_close(got[0], expected[0])
    assert got[1] == expected[1]
    assert got[2] == expected[2]


def test_a_metered_engine_follows_a_metered_one(llama_dir):
    meter, model = Meter(MetricsConfig(), ALONE), TrainedModelConfig(path=str(llama_dir))
    follower, source = (open_engine(llama_dir) for _ in range(2))
    source.train_batch(random_batch(0), MicroBatchSpec(BUDGET), token_loss, tokens_in_loss)
    meter.around(follower, model).move_towards(meter.around(source, model), 1.0)
    assert_close(parameters_of(follower), parameters_of(source), atol=1e-7)
