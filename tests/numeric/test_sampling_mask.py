"""Replay of sampling masks: values, gradients and entropies of the renormalised distribution equal slow
loops in float64, and the trainer's logprobs equal those of the server that sampled."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import LLMResponse, Trajectory
from tests.numeric.backends import generate_all, prompt_of, request, serving
from tests.numeric.engines import (
    WIDE,
    assert_close,
    assert_same_figures,
    open_engine,
    parameters_of,
    tokens_in_loss,
)
from tests.numeric.models import VOCAB_SIZE, save_model
from tests.numeric.ranks import run_ranks
from tests.numeric.test_heads import save_odd_model
from trainer.algorithms import logprobs
from trainer.algorithms.logprobs import chunked_logprobs, token_logprobs
from trainer.algorithms.losses import policy_loss
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput
from trainer.backends.fsdp2 import FSDP2Engine
from trainer.batching.sampling_mask import PackedSamplingMask
from trainer.batching.sequences import SequenceBatch, batch_of_trajectories
from trainer.topology import Topology

T, V, H = 13, 29, 6
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles, some of which hold no token that is left."""
    monkeypatch.setattr(logprobs, "VOCABULARY_TILE", 8)


def random_sets(labels: Tensor, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Tokens left at each position, among them the label; none where nothing was cut."""
    generator = torch.Generator().manual_seed(seed)
    sets = []
    for at, label in enumerate(labels.tolist()):
        size = int(torch.randint(0, 7, (1,), generator=generator))
        others = torch.randint(vocab_size, (size,), generator=generator).tolist()
        sets.append([] if at % 5 == 4 else sorted({label, *others}))
    return sets


def mask_of(sets: list[list[int]]) -> PackedSamplingMask:
    pairs = [(at, token) for at, tokens in enumerate(sets) for token in tokens]
    positions, tokens = torch.tensor(pairs).t().contiguous()
    return PackedSamplingMask(len(sets), positions, tokens)


def slow_row(
    hidden: list[float], weight: list[list[float]], bias: list[float], left: list[int]
) -> dict[int, float]:
    """Probability of each token left, in Python floats."""
    logits = {
        v: (math.fsum(h * w for h, w in zip(hidden, weight[v], strict=True)) + bias[v])
        / TEMPERATURE
        for v in left or range(len(weight))
    }
    peak = max(logits.values())
    total = math.fsum(math.exp(z - peak) for z in logits.values())
    return {v: math.exp(z - peak) / total for v, z in logits.items()}


def slow_loop(
    hidden: Tensor, weight: Tensor, bias: Tensor, labels: Tensor, sets: list[list[int]], mix: Tensor
) -> tuple[list[float], list[float], list[Tensor]]:
    """Logprobs, entropies, and gradients of Σ mix₀·logprob + mix₁·entropy by hand, position by position.

    d logprob / d z_v = [v = label] - p_v and d H / d z_v = -p_v (log p_v + H) for the tokens left, 0 for
    the others.
    """
    grads = [torch.zeros_like(leaf) for leaf in (hidden, weight, bias)]
    values, entropies = [], []
    for t, left in enumerate(sets):
        p = slow_row(hidden[t].tolist(), weight.tolist(), bias.tolist(), left)
        label = int(labels[t])
        entropy = -math.fsum(q * math.log(q) for q in p.values())
        values.append(math.log(p[label]))
        entropies.append(entropy)
        for v, q in p.items():
            slope = float(mix[0, t]) * ((v == label) - q)
            slope -= float(mix[1, t]) * q * (math.log(q) + entropy)
            slope /= TEMPERATURE
            grads[0][t] += slope * weight[v].detach()
            grads[1][v] += slope * hidden[t].detach()
            grads[2][v] += slope
    return values, entropies, grads


@pytest.mark.parametrize("kept_bytes", [0, 300, 1 << 20], ids=["none", "some", "all"])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 1024])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_values_and_gradients_equal_a_loop_in_float64(dtype, chunk_tokens, kept_bytes):
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (
        torch.randn(shape, generator=generator).to(dtype).requires_grad_()
        for shape in ((T, H), (V, H), (V,))
    )
    labels = torch.randint(V, (T,), generator=generator)
    sets = random_sets(labels, V)
    mix = torch.randn(2, T, generator=generator, dtype=torch.float64)
    exact = [leaf.detach().double() for leaf in (hidden, weight, bias)]
    values, entropies, grads = slow_loop(*exact, labels, sets, mix)
    got, entropy = chunked_logprobs(
        hidden, weight, labels, TEMPERATURE, chunk_tokens, bias, True, kept_bytes, mask_of(sets)
    )
    bound = 1e-12 if dtype == torch.float64 else 5e-6
    assert got.tolist() == pytest.approx(values, abs=bound)
    assert entropy.tolist() == pytest.approx(entropies, abs=bound)
    (mix[0] * got + mix[1] * entropy).sum().backward()
    for leaf, expected in zip((hidden, weight, bias), grads, strict=True):
        torch.testing.assert_close(leaf.grad.double(), expected, atol=bound, rtol=bound)
    logits = hidden.detach() @ weight.detach().t() + bias.detach()
    plain = token_logprobs(logits, labels, TEMPERATURE, mask_of(sets))
    assert plain.tolist() == pytest.approx(values, abs=5e-6)


def test_a_token_that_could_not_be_drawn_gets_no_gradient():
    hidden = torch.randn(2, H)
    weight = torch.randn(V, H, requires_grad=True)
    mask = mask_of([[3, 17], [3]])
    both = chunked_logprobs(
        hidden, weight, torch.tensor([17, 3]), with_entropy=True, sampling_mask=mask
    )
    assert both[0][1].item() == both[1][1].item() == 0.0  # it was certain
    (both[0].sum() + both[1].sum()).backward()
    assert weight.grad.abs().sum(1).nonzero()[:, 0].tolist() == [3, 17]


def test_without_pairs_no_bit_changes():
    hidden, weight = torch.randn(T, H), torch.randn(V, H)
    labels = torch.randint(V, (T,))
    nothing = torch.empty(0, dtype=torch.int64)
    plain = chunked_logprobs(hidden, weight, labels, with_entropy=True)
    masked = chunked_logprobs(
        hidden,
        weight,
        labels,
        with_entropy=True,
        sampling_mask=PackedSamplingMask(T, nothing, nothing),
    )
    for one, other in zip(plain, masked, strict=True):
        assert torch.equal(one, other)


CUTS = (
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.1},
    {"top_p": 0.8, "top_k": 20, "min_p": 0.02, "min_new_tokens": 6, "stop_token_ids": (2, 3)},
    {},
)


async def sampled(folder: Path, device: object = None) -> list[Trajectory]:
    """Trajectories of requests with and without cuts, in the order of `CUTS`, three of each."""
    options = {"seed": 7, "temperature": TEMPERATURE, "max_new_tokens": 12}
    asked = [
        request(f"r{at}", prompt_of(3 + at, at), **(options | CUTS[at // 3] | {"seed": at}))
        for at in range(3 * len(CUTS))
    ]
    asked = [each.model_copy(update={"sampling_mask": True}) for each in asked]
    async with serving(folder, max_sequences=8, device=device) as backend:
        answers = await generate_all(backend, asked)
    return [trajectory_of(r.input_ids, a) for r, a in zip(asked, answers, strict=True)]


def trajectory_of(prompt: tuple[int, ...], answer: LLMResponse) -> Trajectory:
    ids = [*prompt, *answer.output_tokens]
    is_sampled = np.arange(len(ids)) >= len(prompt)
    mask = answer.sampling_mask
    if mask is not None:
        assert mask.problem(answer.output_tokens) is None
        mask = SamplingMask.join([SamplingMask.whole(len(prompt)), mask])
    return Trajectory(
        rollout_id=answer.rid,
        group_id=answer.rid,
        sample_index=0,
        input_ids=np.array(ids, np.int32),
        loss_mask=is_sampled,
        logprobs=np.array([0.0] * len(prompt) + answer.output_logprobs, np.float32),
        versions=np.where(is_sampled, 0, -1).astype(np.int32),
        reward=1.0,
        stop_reason="length",
        sampling_mask=mask,
    )


def judged(output: ModelOutput, batch: SequenceBatch) -> Tensor:
    both = output.logprobs_and_entropy(batch["labels"], TEMPERATURE, batch["action_mask"])
    return torch.stack(both, dim=1)


@pytest.mark.parametrize("kind", ["llama", "nanochat"], ids=["one matrix", "whole logits"])
async def test_the_trainer_s_logprobs_are_those_of_the_server(tmp_path, kind):
    save = save_model if kind == "llama" else save_odd_model
    folder = save(tmp_path, kind)
    trajectories = await sampled(folder)
    assert [row.sampling_mask is None for row in trajectories] == [False] * 12 + [True] * 3
    batch = batch_of_trajectories(trajectories)
    both = open_engine(folder).forward(batch, MicroBatchSpec(40), post_hook=judged)
    mask = batch["action_mask"]
    errors = (both[:, 0] - batch["behaviour_logprobs"])[mask].abs()
    assert errors.max() < 1e-4
    assert errors.mean() < 1e-5
    assert (both[:, 1] >= -1e-6).all()
    assert (both[~mask] == 0.0).all()
    unmasked = SequenceBatch(batch.lengths, batch.columns)
    whole = open_engine(folder).forward(unmasked, MicroBatchSpec(40), post_hook=judged)
    assert ((batch["behaviour_logprobs"] - whole[:, 0])[mask] > -1e-4).all()  # it loses no mass
    assert (batch["behaviour_logprobs"] - whole[:, 0])[mask].mean() > 0.01


def masked_batch(seed: int) -> SequenceBatch:
    """Random sequences with the columns of the loss, and masks on most of what is in it."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number, length in enumerate((9, 3, 17, 5, 12, 2, 8)):
        ids = torch.randint(VOCAB_SIZE, (length,), generator=generator)
        is_sampled = torch.rand(length, generator=generator) < 0.7
        is_sampled[0] = False
        sets = random_sets(ids, VOCAB_SIZE, seed + number)
        left = [
            np.array(s if on else [], np.int32)
            for s, on in zip(sets, is_sampled.tolist(), strict=True)
        ]
        behaviour = -4 * torch.rand(length, generator=generator) * is_sampled
        rows.append(
            Trajectory(
                rollout_id=f"r{number}",
                group_id="g",
                sample_index=0,
                input_ids=ids.numpy().astype(np.int32),
                loss_mask=is_sampled.numpy(),
                logprobs=behaviour.numpy(),
                versions=np.where(is_sampled.numpy(), 0, -1).astype(np.int32),
                reward=0.0,
                stop_reason="stop",
                sampling_mask=None if number == 1 else SamplingMask.of(left),
            )
        )
    batch = batch_of_trajectories(rows)
    noise = torch.randn(2, batch.num_tokens, generator=generator)
    return batch.with_columns(
        loss_mask=batch["action_mask"],
        proximal_logprobs=batch["behaviour_logprobs"] + 0.3 * noise[0],
        advantages=noise[1],
    )


def loss_with_entropy(output: ModelOutput, batch: SequenceBatch) -> LossOutput:
    mask = batch["loss_mask"]
    both = output.logprobs_and_entropy(batch["labels"], TEMPERATURE, mask)
    config = WIDE.model_copy(update={"entropy_coef": 0.1})
    return LossOutput(*policy_loss(config, batch, *both))


def one_step(engine: FSDP2Engine, batch: SequenceBatch, budget: int) -> dict[str, float]:
    return engine.train_batch(batch, MicroBatchSpec(budget), loss_with_entropy, tokens_in_loss)


def step_of_rank(topology: Topology, folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """One step on this rank's part of the batch."""
    engine = open_engine(folder, topology=topology)
    batch = masked_batch(0).select(range(topology.rank, 7, topology.world_size))
    return one_step(engine, batch, 20), parameters_of(engine)


def test_packing_and_two_ranks_give_the_step_of_one_pass(llama_dir, tmp_path):
    one = open_engine(llama_dir)
    expected = one_step(one, masked_batch(0), 10_000)
    split = open_engine(llama_dir)
    assert_same_figures(one_step(split, masked_batch(0), 17), expected, grad_norm=1e-5)
    assert_close(parameters_of(split), parameters_of(one), atol=2e-6)
    unmasked = masked_batch(0)
    plain = one_step(
        open_engine(llama_dir), SequenceBatch(unmasked.lengths, unmasked.columns), 10_000
    )
    assert plain["grad_norm"] != pytest.approx(expected["grad_norm"], rel=1e-2)
    for metrics, parameters in run_ranks(2, tmp_path / "ranks", step_of_rank, llama_dir):
        assert_same_figures(metrics, expected, grad_norm=1e-5)
        assert_close(parameters, parameters_of(one), atol=2e-6)
