"""Mixtures of experts: served, trained and published like dense models, in the form of checkpoints."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from tests.numeric.backends import errors, generate_all, prompt_of, request, serving, stage
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
from tests.numeric.models import load_reference, reference_logits, save_model
from tests.numeric.ranks import run_ranks
from trainer.api import MicroBatchSpec, SaveLoadMeta
from trainer.batching.balance import partition_by_tokens
from trainer.batching.sequences import SequenceBatch
from trainer.topology import Topology
from weight_sync.checkpoint import checkpoint_shapes
from weight_sync.checkpoint_names import CheckpointNames
from weight_sync.deadline import Deadline
from weight_sync.model_dir import model_without_weights
from weight_sync.receiver import make_receiver
from weight_sync.transports.disk import make_local_publisher

KINDS = ("qwen3_moe", "mixtral")
SPEC = MicroBatchSpec(25)
ALONE = Topology(0, 1, torch.device("cpu"))
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("experts")
    return {kind: save_model(root / kind, kind) for kind in (*KINDS, "llama", "qwen3")}


@pytest.mark.parametrize("kind", [*KINDS, "llama", "qwen3"])
def test_names_and_shapes_are_those_of_the_checkpoint(folders: dict[str, Path], kind: str) -> None:
    model = load_reference(folders[kind])
    names = CheckpointNames(model)
    assert names.shapes == checkpoint_shapes(str(folders[kind]))
    assert CheckpointNames(model_without_weights(ModelConfig(path=str(folders[kind])))).shapes == (
        names.shapes
    )
    parameters = dict(model.named_parameters())
    parts = dict(names.split(parameters.items()))
    assert {name: part.shape for name, part in parts.items()} == names.shapes
    merged = names.merge(parts)
    assert merged.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert torch.equal(merged[name], parameter), name
    for name, part in parts.items():
        found = names.read(name, parameters)
        assert found is not None and torch.equal(found, part), name
    assert names.read("model.layers.0.mlp.experts.9.down_proj.weight", parameters) is None


@torch.no_grad()
def reference_of(folder: Path, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Logprobs of a response, in float64."""
    logits = reference_logits(load_reference(folder).double(), prompt + tokens)
    table = torch.log_softmax(logits, dim=-1)
    return torch.stack([table[len(prompt) + i - 1, token] for i, token in enumerate(tokens)])


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_sampled_as_transformers_computes_before_and_after_a_version(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    other = save_model(tmp_path / "other", kind, seed=1)
    prompts = [prompt_of(length, length) for length in (5, 33, 12)]
    asked = [request(f"r{i}", prompt) for i, prompt in enumerate(prompts)]

    async def play() -> list[Any]:
        async with serving(folders[kind]) as backend:
            first = await generate_all(backend, asked)
            await backend.swap(stage(1, other))
            return [*first, *await generate_all(backend, asked)]

    responses = asyncio.run(play())
    for folder, half in ((folders[kind], responses[:3]), (other, responses[3:])):
        for prompt, response in zip(prompts, half, strict=True):
            expected = reference_of(folder, prompt, list(response.output_tokens))
            assert errors(response.output_logprobs, expected).max() < 1e-4


def test_what_a_trainer_publishes_is_a_checkpoint_that_servers_swap_in(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    root = str(tmp_path / "versions")
    with closing(make_local_publisher(root)) as publisher:
        engine = open_engine(folders["qwen3_moe"], publisher=publisher)
        engine.train_batch(random_batch(0), SPEC, token_loss, tokens_in_loss)
        meta = publisher.announce(1)
        engine.upload_weights(meta)
    engine.save(SaveLoadMeta(str(tmp_path / "saved"), weight_format="hf", with_optim=False))
    shapes = checkpoint_shapes(str(folders["qwen3_moe"]))
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in shapes
    with closing(make_receiver(ReceiverConfig(allow=(root,)))) as receiver:
        staged = receiver.within(Deadline(LIMIT_S)).stage(meta, shapes)
    assert staged.tensors.keys() == shapes.keys()
    prompt = prompt_of(9, 0)

    async def play() -> list[Any]:
        async with serving(folders["qwen3_moe"]) as backend:
            await backend.swap(staged)
            assert backend.parameters == shapes
            name = "model.layers.1.mlp.experts.3.up_proj.weight"
            assert torch.equal(backend.read_parameter(name), staged.tensors[name])
            return await generate_all(backend, [request("r", prompt)])

    (response,) = asyncio.run(play())
    expected = reference_of(tmp_path / "saved", prompt, list(response.output_tokens))
    assert errors(response.output_logprobs, expected).max() < 1e-4


def train(topology: Topology, folder: Path) -> Any:
    """Two steps on this rank's share of fixed global batches."""
    engine = open_engine(folder, topology=topology)
    metrics = []
    for seed in range(2):
        batch = random_batch(seed)
        mine = partition_by_tokens(batch.lengths, topology.world_size)[topology.rank]
        metrics.append(engine.train_batch(batch.select(mine), SPEC, token_loss, tokens_in_loss))
    return metrics, parameters_of(engine)


def test_two_ranks_train_experts_as_one_process_does(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    expected, parameters = train(ALONE, folders["qwen3_moe"])
    for metrics, got in run_ranks(2, tmp_path, train, folders["qwen3_moe"]):
        for step, wanted in zip(metrics, expected, strict=True):
            assert_same_figures(step, wanted, grad_norm=GRAD_NORM)
        assert_close(got, parameters, 2e-6)


def test_a_step_is_that_of_a_plain_loop(folders: dict[str, Path]) -> None:
    """Of transformers' own forward, sequence by sequence, without packing."""
    batch = random_batch(0)
    model = load_reference(folders["qwen3_moe"])
    engine = open_engine(folders["qwen3_moe"])
    got = engine.forward(
        batch, SPEC, post_hook=lambda output, b: output.logprobs(b["labels"]), aggregate_fn=list
    )
    starts = [sum(batch.lengths[:i]) for i in range(len(batch.lengths))]
    for start, length, logprobs in zip(starts, batch.lengths, got, strict=True):
        ids = batch["input_ids"][start : start + length]
        with torch.no_grad():
            table = torch.log_softmax(reference_logits(model, ids.tolist()).double(), dim=-1)
        wanted = table[torch.arange(length - 1), ids[1:]]
        assert (logprobs[: length - 1].double() - wanted).abs().max() < 1e-5


def experts_of(model: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    """[T, L, K] that the routers choose for one sequence alone."""
    seen: list[torch.Tensor] = []
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
    handles = [
        router.register_forward_hook(lambda _, __, output: seen.append(output[2]))
        for router in routers
    ]
    with torch.no_grad():
        reference_logits(model, ids)
    for handle in handles:
        handle.remove()
    return torch.stack(seen, dim=1)


def with_experts(asked: Any) -> Any:
    return asked.model_copy(update={"routed_experts": True})


def test_routed_experts_are_those_of_every_token_however_it_was_computed(
    folders: dict[str, Path],
) -> None:
    """In chunks, from the row of another sequence, after a preemption, in a batch of another order."""
    folder = folders["qwen3_moe"]
    stem = prompt_of(40, 0)
    prompts = [stem + prompt_of(5, seed) for seed in range(1, 5)] + [prompt_of(70, 9)]
    asked = [
        with_experts(request(f"r{i}", prompt, max_new_tokens=10 + 3 * i))
        for i, prompt in enumerate(prompts)
    ]

    async def play() -> list[Any]:
        options = {"max_prefill_tokens": 16, "max_sequences": 3, "kv_cache_bytes": 1 << 17}
        async with serving(folder, **options) as backend:
            responses = await generate_all(backend, asked)
            plain = await generate_all(backend, [request("plain", stem)])
            assert plain[0].routed_experts is None
            return responses

    model = load_reference(folder)
    responses = asyncio.run(play())
    assert any(response.cached_tokens for response in responses)
    for prompt, response in zip(prompts, responses, strict=True):
        tokens = [*prompt, *response.output_tokens]
        experts = response.routed_experts.experts
        assert experts.shape == (len(tokens) - 1, 2, 2)
        assert experts.tolist() == experts_of(model, tokens[:-1]).tolist()


def test_a_dense_model_has_no_routed_experts(folders: dict[str, Path]) -> None:
    async def play() -> Any:
        async with serving(folders["llama"]) as backend:
            return await generate_all(backend, [with_experts(request("r", prompt_of(5, 0)))])

    assert asyncio.run(play())[0].routed_experts is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_computes_tokens_with_the_experts_of_the_batch(
    folders: dict[str, Path], kind: str
) -> None:
    """Against transformers whose routers are told, with weights by another formula."""
    batch = random_batch(0)
    generator = torch.Generator().manual_seed(3)
    drawn = torch.rand(batch.num_tokens, 2, 4, generator=generator).topk(2).indices
    drawn[::5] = -1  # there the routers choose
    engine = open_engine(folders[kind])
    replayed = replace(batch, routed_experts=drawn)

    def logprobs_of(given: SequenceBatch) -> list[torch.Tensor]:
        return engine.forward(
            given, SPEC, post_hook=lambda out, b: out.logprobs(b["labels"]), aggregate_fn=list
        )

    own = logprobs_of(batch)
    got = logprobs_of(replayed)
    assert max(float((a - b).abs().max()) for a, b in zip(own, got, strict=True)) > 0.1
    for before, after in zip(own, logprobs_of(batch), strict=True):
        assert torch.equal(before, after)  # nothing is left of the replay
    model = load_reference(folders[kind])
    told: dict[str, torch.Tensor] = {}
    routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]

    def tell(layer: int) -> Any:
        def hook(_: Any, __: Any, output: Any) -> Any:
            experts = told["experts"][:, layer]
            experts = torch.where(experts < 0, output[2], experts)
            return output[0], output[0].gather(1, experts).softmax(dim=-1), experts

        return hook

    for layer, router in enumerate(routers):
        router.register_forward_hook(tell(layer))
    start = 0
    for length, logprobs in zip(batch.lengths, got, strict=True):
        ids = batch["input_ids"][start : start + length]
        told["experts"] = drawn[start : start + length]
        with torch.no_grad():
            table = torch.log_softmax(reference_logits(model, ids.tolist()).double(), dim=-1)
        wanted = table[torch.arange(length - 1), ids[1:]]
        assert (logprobs[: length - 1].double() - wanted).abs().max() < 1e-5
        start += length


def test_what_the_routers_choose_themselves_is_replayed_to_the_same_step(
    folders: dict[str, Path],
) -> None:
    folder = folders["qwen3_moe"]
    batch = random_batch(0)
    model = load_reference(folder)
    ends = torch.tensor(batch.lengths).cumsum(0).tolist()
    parts = [
        experts_of(model, batch["input_ids"][end - length : end].tolist())
        for end, length in zip(ends, batch.lengths, strict=True)
    ]
    results = []
    for given in (batch, replace(batch, routed_experts=torch.cat(parts))):
        engine = open_engine(folder, gradient_checkpointing=given is not batch)
        stats = engine.train_batch(given, SPEC, token_loss, tokens_in_loss)
        results.append((stats, parameters_of(engine)))
    assert_same_figures(results[1][0], results[0][0], grad_norm=GRAD_NORM)
    assert_close(results[1][1], results[0][1], 2e-6)
    routers = [name for name in results[0][1] if name.endswith("mlp.gate.weight")]
    before = dict(model.named_parameters())
    for name in routers:
        assert not torch.equal(results[1][1][name], before[name])
