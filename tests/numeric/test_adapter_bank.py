"""Several adapters beside one base: each request gets what its own merged model computes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import EmbeddedTorchConfig
from headway.contracts.errors import BackendError, Conflict, DataError, SyncError
from headway.contracts.types import LLMRequest, LLMResponse
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from tests.numeric.adapters import merged_reference, save_adapter
from tests.numeric.backends import (
    KV_BYTES,
    Call,
    errors,
    generate_all,
    make_backend,
    prompt_of,
    request,
    serving,
    stage,
)
from tests.numeric.models import extend_cache, reference_logits, reference_logprobs, save_model
from tests.numeric.paged import PagedCpu
from weight_sync.adapter import CONFIG_NAME
from weight_sync.adapter_dir import WEIGHTS_NAME
from weight_sync.channel import StagedWeights
from weight_sync.checkpoint_names import CheckpointNames

TOLERANCE = 1e-4
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LORAS = {
    "query": {"r": 1, "lora_alpha": 2, "target_modules": ["q_proj"]},
    "usual": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "key": {"r": 2, "lora_alpha": 3, "target_modules": ["k_proj", "o_proj"]},
    "attention": {"r": 8, "lora_alpha": 8, "target_modules": ATTENTION},
    "mlp": {"r": 3, "lora_alpha": 6, "target_modules": MLP},
    "down": {"r": 16, "lora_alpha": 8, "target_modules": ["down_proj"]},
    "all": {"r": 5, "lora_alpha": 5, "target_modules": ATTENTION + MLP, "use_rslora": True},
    "second": {
        "r": 6,
        "lora_alpha": 12,
        "target_modules": ["up_proj", "q_proj"],
        "layers_to_transform": [1],
    },
}
NAMES = [None, *LORAS]
"""None is the base."""
LONG = 200
Folders = Mapping[str, Path]


@pytest.fixture(scope="module")
def adapters(llama_dir, tmp_path_factory) -> Folders:
    """Adapters of the llama, by name."""
    return save_adapters(llama_dir, tmp_path_factory.mktemp("adapters"), LORAS)


@pytest.fixture(scope="module")
def models(llama_dir, adapters) -> dict[str | None, torch.nn.Module]:
    """The merged llamas, by name."""
    return merged_models(llama_dir, adapters)


def save_adapters(base: Path, root: Path, loras: Mapping[str, dict]) -> Folders:
    return {
        name: save_adapter(root / name, base, seed, **lora)
        for seed, (name, lora) in enumerate(loras.items())
    }


def merged_models(base: Path, folders: Folders) -> dict[str | None, torch.nn.Module]:
    merged = {name: merged_reference(base, folder) for name, folder in folders.items()}
    return {None: merged_reference(base, None), **merged}


async def load_all(backend: EmbeddedTorchBackend, folders: Folders) -> None:
    for name, folder in folders.items():
        await backend.load_adapter(name, folder, 1)


def asked(rid: str, prompt: list[int], adapter: str | None, **options) -> LLMRequest:
    return request(rid, prompt, **options).model_copy(update={"adapter": adapter})


def mixed_requests(names: Sequence[str | None], count: int = 48) -> list[LLMRequest]:
    """Adapters at random, prompts that begin alike, greedy ones and sampled ones."""
    rng = random.Random(0)
    beginning = prompt_of(24, 99)
    drawn = [*names, *rng.choices(names, k=count - len(names))]
    rng.shuffle(drawn)
    requests = []
    for index, name in enumerate(drawn):
        prompt = beginning[: rng.choice([0, 9, 24])] + prompt_of(rng.randrange(1, 9), index)
        length, temperature = rng.randrange(4, 24), rng.choice([0.0, 1.0])
        options = {"max_new_tokens": length, "temperature": temperature, "seed": index}
        requests.append(asked(f"r{index}", prompt, name, **options))
    return requests


@torch.no_grad()
def check_alone(model: torch.nn.Module, req: LLMRequest, response: LLMResponse) -> None:
    """Check a response against a full forward of one model over its tokens."""
    prompt, output = list(req.input_ids), response.output_tokens
    assert len(output) == req.gconfig.max_new_tokens
    expected = reference_logprobs(model, prompt, output)
    assert errors(response.output_logprobs, expected).max() < TOLERANCE, req.adapter
    if req.gconfig.temperature == 0.0:
        logits = reference_logits(model, prompt + output)[len(prompt) - 1 : -1]
        assert logits.argmax(dim=-1).tolist() == output, req.adapter


def check_all(
    models: Mapping[str | None, torch.nn.Module],
    requests: Sequence[LLMRequest],
    responses: Sequence[LLMResponse],
) -> None:
    for req, response in zip(requests, responses, strict=True):
        check_alone(models[req.adapter], req, response)
        version = 0 if req.adapter is None else 1
        assert response.version_runs == [(version, 0, len(response.output_tokens))]


def staged(version: int, model: torch.nn.Module) -> StagedWeights:
    weights = CheckpointNames(model).split(model.named_parameters())
    tensors = {name: weight.detach().float() for name, weight in weights}
    return StagedWeights(version, "0" * 64, tensors)


# Mixtures.


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"pack_weights": False},
        {"speculative_tokens": 4, "max_prefill_tokens": 16},
        {"kv_cache_bytes": 1 << 17},
    ],
    ids=["packed", "plain", "guesses", "short of memory"],
)
async def test_a_mixture_of_eight_gets_what_each_merged_model_computes(
    llama_dir, adapters, models, config
):
    requests = mixed_requests(NAMES)
    async with serving(llama_dir, **{"max_sequences": 12} | config) as backend:
        await load_all(backend, adapters)
        assert backend.adapters == dict.fromkeys(LORAS, 1)
        responses = await generate_all(backend, requests)
    check_all(models, requests, responses)


async def test_a_mixture_on_blocks_and_graphs(llama_dir, adapters, models):
    options = EmbeddedTorchConfig(max_sequences=12, kv_cache_bytes=KV_BYTES)
    model = ModelConfig(path=str(llama_dir), dtype="float32")
    backend = EmbeddedTorchBackend(options, model, 0, device=PagedCpu())
    await backend.start()
    try:
        await load_all(backend, adapters)
        requests = mixed_requests(NAMES)
        responses = await generate_all(backend, requests)
        plain = [asked(f"b{i}", prompt_of(7, i), None) for i in range(4)]
        answers = await generate_all(backend, plain)  # in graphs, as no adapter takes part
    finally:
        await backend.aclose()
    check_all(models, requests + plain, responses + answers)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
async def test_a_mixture_on_another_architecture(tmp_path, kind):
    base = save_model(tmp_path / "base", kind)
    loras = {name: LORAS[name] for name in ("usual", "key", "attention")}
    folders = save_adapters(base, tmp_path, loras)
    requests = mixed_requests([None, *loras], count=16)
    async with serving(base, max_sequences=8) as backend:
        await load_all(backend, folders)
        responses = await generate_all(backend, requests)
    check_all(merged_models(base, folders), requests, responses)


async def test_a_seed_draws_the_tokens_of_the_merged_weights(llama_dir, adapters, models):
    def drawn(name: str | None) -> list[LLMRequest]:
        return [asked(f"{name}-{i}", prompt_of(6, i), name, seed=i) for i in range(3)]

    requests = [each for name in NAMES for each in drawn(name)]
    random.Random(1).shuffle(requests)
    async with serving(llama_dir, max_sequences=12) as backend:
        await load_all(backend, adapters)
        responses = await generate_all(backend, requests)
    found = {r.rid: response.output_tokens for r, response in zip(requests, responses, strict=True)}
    async with serving(llama_dir) as alone:
        for version, name in enumerate(NAMES, start=1):
            await alone.swap(staged(version, models[name]))
            for req in drawn(name):
                plain = req.model_copy(update={"adapter": None})
                assert (await alone.generate(plain)).output_tokens == found[req.rid], name


async def test_scores_of_a_prompt_are_those_of_the_adapter(llama_dir, adapters, models):
    prompt = prompt_of(30, 3)
    requests = [
        asked(str(name), prompt, name, max_new_tokens=0, logprob_start=0, top_logprobs=2)
        for name in NAMES
    ]
    async with serving(llama_dir) as backend:
        await load_all(backend, adapters)
        responses = await generate_all(backend, requests)
    for name, response in zip(NAMES, responses, strict=True):
        assert response.prompt_logprobs is not None
        with torch.no_grad():
            expected = reference_logprobs(models[name], prompt[:1], prompt[1:])
        assert errors(response.prompt_logprobs[1:], expected).max() < TOLERANCE, name


async def test_prefixes_are_shared_within_an_adapter_only(llama_dir, adapters, models):
    prompt = prompt_of(40, 5)
    names = [None, "usual", "mlp"]

    async def cached(name: str | None, rid: str) -> int:
        req = asked(rid, prompt, name, max_new_tokens=4)
        response = await backend.generate(req)
        check_alone(models[name], req, response)
        return response.cached_tokens

    async with serving(llama_dir, max_sequences=12) as backend:
        await load_all(backend, adapters)
        assert [await cached(name, "first") for name in names] == [0, 0, 0]
        assert [await cached(name, "again") for name in names] == [39, 39, 39]
        await backend.load_adapter("usual", adapters["usual"], 2)
        assert [await cached(name, "later") for name in names] == [39, 0, 39]
        await backend.unload_adapter("usual")
        await backend.load_adapter("usual", adapters["usual"], 1)
        assert [await cached(name, "last") for name in names] == [39, 0, 39]


# Versions.


@torch.no_grad()
def replay(
    versions: Mapping[int, torch.nn.Module], prompt: list[int], response: LLMResponse
) -> torch.Tensor:
    """Logprobs of tokens that several versions sampled over one kept cache."""
    cache = DynamicCache()
    fed, logprobs = prompt, []
    for token, version in zip(response.output_tokens, response.output_versions, strict=True):
        logits = extend_cache(versions[version], cache, fed)
        logprobs.append(torch.log_softmax(logits[-1].double(), dim=-1)[token])
        fed = [token]
    return torch.stack(logprobs)


async def test_a_version_takes_over_in_flight_and_touches_no_other(
    llama_dir, adapters, models, tmp_path
):
    folder = save_adapter(tmp_path / "usual", llama_dir, seed=50, **LORAS["mlp"])
    later = merged_reference(llama_dir, folder)
    names = [None, "usual", "all"]
    async with serving(llama_dir, max_sequences=3) as backend:
        await load_all(backend, adapters)
        requests = [
            asked(str(name), prompt_of(9, seed), name, seed=seed, max_new_tokens=LONG)
            for seed, name in enumerate(names)
        ]
        calls = [Call(backend, req) for req in requests]
        await asyncio.gather(*(call.heard.until(5) for call in calls))
        await backend.pause("in_place")  # so that it comes in the middle of all of them
        await backend.load_adapter("usual", folder, 2)
        assert backend.adapters == dict.fromkeys(LORAS, 1) | {"usual": 2}
        assert backend.version == 0
        await backend.resume()
        plain, mixed, other = [await call.response() for call in calls]
        fresh = asked("fresh", prompt_of(9, 1), "usual", seed=7)
        after = await backend.generate(fresh)
    check_alone(models[None], requests[0], plain)
    check_alone(models["all"], requests[2], other)
    assert (plain.version_runs, other.version_runs) == ([(0, 0, LONG)], [(1, 0, LONG)])
    (first, _, cut), (second, _, end) = mixed.version_runs
    assert (first, second, end) == (1, 2, LONG) and 5 <= cut < LONG
    expected = replay({1: models["usual"], 2: later}, prompt_of(9, 1), mixed)
    assert errors(mixed.output_logprobs, expected).max() < TOLERANCE
    check_alone(later, fresh, after)
    assert after.version_runs == [(2, 0, 20)]


async def test_versions_that_come_while_requests_run_are_told_truly(llama_dir, adapters, models):
    folders = {version: adapters[name] for version, name in enumerate(LORAS, start=1)}
    versions = {version: models[name] for version, name in enumerate(LORAS, start=1)}
    async with serving(llama_dir, max_sequences=4) as backend:
        await backend.load_adapter("moving", folders[1], 1)
        await backend.load_adapter("still", folders[1], 1)
        requests = [
            asked(f"r{i}", prompt_of(5 + i, i), name, seed=i, max_new_tokens=LONG)
            for i, name in enumerate(["moving", "still", "moving", None])
        ]
        tasks = [Call(backend, req) for req in requests]
        for version in range(2, len(LORAS) + 1):
            await backend.load_adapter("moving", folders[version], version)
        responses = [await call.response() for call in tasks]
    for req, response in zip(requests, responses, strict=True):
        if req.adapter == "moving":
            told = [version for version, _, _ in response.version_runs]
            assert told == sorted(set(told))
            expected = replay(versions, list(req.input_ids), response)
            assert errors(response.output_logprobs, expected).max() < TOLERANCE
        else:
            check_alone(models["query" if req.adapter else None], req, response)
            assert response.version_runs == [(1 if req.adapter else 0, 0, LONG)]


@pytest.mark.parametrize("is_packed", [True, False])
async def test_the_base_changes_below_its_adapters(llama_dir, adapters, tmp_path, is_packed):
    base = save_model(tmp_path / "base", "llama", seed=1)
    requests = mixed_requests(NAMES, count=20)
    async with serving(llama_dir, max_sequences=12, pack_weights=is_packed) as backend:
        await load_all(backend, adapters)
        await generate_all(backend, requests)  # prefixes of the old base are kept
        await backend.swap(stage(3, base))
        assert (backend.version, backend.adapters) == (3, dict.fromkeys(LORAS, 1))
        responses = await generate_all(backend, requests)
    models = merged_models(base, adapters)
    for req, response in zip(requests, responses, strict=True):
        check_alone(models[req.adapter], req, response)
        version = 3 if req.adapter is None else 1
        assert response.version_runs == [(version, 0, len(response.output_tokens))]


# Unloading.


async def test_an_unloaded_adapter_ends_its_requests_and_no_others(llama_dir, adapters, models):
    async with serving(llama_dir, max_sequences=3) as backend:
        await load_all(backend, adapters)
        names = ["usual", "all", None, "usual"]
        requests = [
            asked(f"r{i}", prompt_of(6, i), name, max_new_tokens=LONG)
            for i, name in enumerate(names)
        ]
        calls = [Call(backend, req) for req in requests]
        await asyncio.gather(*(call.heard.until(5) for call in calls[:3]))
        await backend.pause("in_place")
        await backend.unload_adapter("usual")
        ended, queued = await calls[0].response(), await calls[3].response()
        assert "usual" not in backend.adapters
        with pytest.raises(DataError, match="'usual' is not loaded; loaded: all, attention"):
            await backend.generate(asked("late", [3], "usual"))
        await backend.resume()
        for index in (1, 2):
            response = await calls[index].response()
            check_alone(models[names[index]], requests[index], response)
        await backend.load_adapter("usual", adapters["usual"], 1)
        again = asked("again", prompt_of(6, 0), "usual")
        check_alone(models["usual"], again, await backend.generate(again))
    assert (ended.stop_reason, queued.stop_reason) == ("interrupt", "interrupt")
    assert (ended.output_tokens, queued.output_tokens) == (calls[0].heard.tokens, [])
    expected = reference_logprobs(models["usual"], prompt_of(6, 0), ended.output_tokens).detach()
    assert errors(ended.output_logprobs, expected).max() < TOLERANCE


async def test_a_request_that_an_unload_overtakes_is_refused(llama_dir, adapters):
    backend = make_backend(llama_dir)
    await backend.load_adapter("usual", adapters["usual"], 1)
    call = Call(backend, asked("r", [3, 4], "usual"))
    await asyncio.sleep(0)  # it is on its way, and no engine has it yet
    await backend.unload_adapter("usual")
    await backend.start()
    with pytest.raises(DataError, match="'usual' is not loaded; loaded: none"):
        await call.response()
    await backend.aclose()


async def test_what_is_not_loaded_is_refused_by_name(llama_dir, adapters):
    async with serving(llama_dir) as backend:
        with pytest.raises(DataError, match="'nobody' is not loaded; loaded: none"):
            await backend.generate(asked("r", [3], "nobody"))
        await backend.load_adapter("usual", adapters["usual"], 1)
        with pytest.raises(DataError, match="'nobody' is not loaded; loaded: usual"):
            await backend.generate(asked("r", [3], "nobody"))
        with pytest.raises(DataError, match="'nobody' is not loaded"):
            await backend.unload_adapter("nobody")


async def test_there_are_no_more_than_the_setting_allows(llama_dir, adapters, models):
    async with serving(llama_dir, max_adapters=2) as backend:
        await backend.load_adapter("usual", adapters["usual"], 1)
        await backend.load_adapter("mlp", adapters["mlp"], 1)
        with pytest.raises(Conflict, match="max_adapters=2 adapters are loaded"):
            await backend.load_adapter("key", adapters["key"], 1)
        await backend.load_adapter("mlp", adapters["all"], 2)
        assert backend.adapters == {"usual": 1, "mlp": 2}
        await backend.unload_adapter("usual")
        await backend.load_adapter("key", adapters["key"], 1)
        requests = [asked(name, prompt_of(5, 1), name) for name in ("mlp", "key")]
        responses = await generate_all(backend, requests)
    check_alone(models["all"], requests[0], responses[0])
    check_alone(models["key"], requests[1], responses[1])


# Damage.

FIRST = "base_model.model.model.layers.0.self_attn.q_proj"
Damage = Callable[[Path], object]


def with_config(**changes: object) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / CONFIG_NAME
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return damage


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        tensors = {name: t.clone() for name, t in load_file(folder / WEIGHTS_NAME).items()}
        change(tensors)
        save_file(tensors, folder / WEIGHTS_NAME)

    return damage


def renamed(old: str, new: str) -> Damage:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return with_tensors(change)


def truncate(folder: Path) -> None:
    file = folder / WEIGHTS_NAME
    file.write_bytes(file.read_bytes()[:-8])


def make_fifo(folder: Path) -> None:
    (folder / WEIGHTS_NAME).unlink()
    os.mkfifo(folder / WEIGHTS_NAME)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "no folder": (shutil.rmtree, "no adapter can be read"),
    "no configuration": (lambda folder: (folder / CONFIG_NAME).unlink(), CONFIG_NAME),
    "no weights": (lambda folder: (folder / WEIGHTS_NAME).unlink(), WEIGHTS_NAME),
    "configuration is no JSON": (lambda f: (f / CONFIG_NAME).write_text("{"), CONFIG_NAME),
    "configuration is a list": (lambda f: (f / CONFIG_NAME).write_text("[]"), CONFIG_NAME),
    "weights are text": (lambda f: (f / WEIGHTS_NAME).write_text("x" * 99), "no adapter can be"),
    "weights are cut": (truncate, "no adapter can be read"),
    "weights are a pipe": (make_fifo, "regular"),
    "no tensors": (with_tensors(dict.clear), "no matrices"),
    "a half is missing": (
        with_tensors(lambda tensors: tensors.pop(f"{FIRST}.lora_B.weight")),
        "lora_B.weight is missing",
    ),
    "another width": (
        with_tensors(lambda t: t.update({f"{FIRST}.lora_A.weight": torch.ones(4, 31)})),
        "makes 32 x 31, the model has 32 x 32",
    ),
    "another height": (
        with_tensors(lambda t: t.update({f"{FIRST}.lora_B.weight": torch.ones(33, 4)})),
        "makes 33 x 32, the model has 32 x 32",
    ),
    "another rank": (with_config(r=8), "its rank is declared as 8"),
    "no rank": (with_config(r=0), "r >= 1"),
    "a layer too many": (renamed("layers.1", "layers.2"), "model.layers.2.self_attn.q_proj"),
    "an unknown module": (renamed("q_proj", "query"), "self_attn.query"),
    "a norm": (renamed("self_attn.q_proj", "input_layernorm"), "input_layernorm"),
    "the head": (renamed("model.layers.1.self_attn.q_proj", "lm_head"), "lm_head, which is no"),
    "an embedding": (
        renamed("layers.1.self_attn.q_proj.lora_A.weight", "embed_tokens.lora_embedding_A"),
        "lora_embedding_A is no matrix of an adapter",
    ),
    "dora": (with_config(use_dora=True), "use_dora"),
    "whole modules": (with_config(modules_to_save=["lm_head"]), "modules_to_save"),
    "biases": (with_config(bias="all"), "bias=all"),
    "ranks that differ": (with_config(rank_pattern={"q_proj": 2}), "rank_pattern"),
    "scales that differ": (with_config(alpha_pattern={"q_proj": 2}), "alpha_pattern"),
    "no LoRA": (with_config(peft_type="IA3"), "peft_type=IA3"),
    "a changed base": (with_config(init_lora_weights="pissa"), "pissa"),
    "an option of the future": (with_config(use_tomorrow=True), "use_tomorrow"),
}


@pytest.fixture(scope="module")
def loaded_server(llama_dir, adapters):
    """One that was not started serves the damaged ones: orders are then carried out at once."""
    backend = make_backend(llama_dir, max_adapters=2)
    asyncio.run(backend.load_adapter("usual", adapters["usual"], 1))
    return backend


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_adapter_is_refused_and_changes_nothing(
    loaded_server, adapters, tmp_path, name
):
    damage, message = DAMAGES[name]
    folder = shutil.copytree(adapters["usual"], tmp_path / "damaged")
    damage(folder)
    held = loaded_server.model.adapters._held["usual"]
    for target in ("usual", "new"):
        with pytest.raises(SyncError, match=message):
            await loaded_server.load_adapter(target, folder, 2)
    assert loaded_server.adapters == {"usual": 1}
    assert loaded_server.model.adapters._held["usual"] is held


async def test_what_peft_writes_for_dora_is_refused(llama_dir, tmp_path):
    lora = {"r": 2, "target_modules": ["q_proj"], "use_dora": True}
    folder = save_adapter(tmp_path / "dora", llama_dir, 0, **lora)
    with pytest.raises(SyncError, match="use_dora"):
        await make_backend(llama_dir).load_adapter("dora", folder, 1)


async def test_a_file_that_is_written_over_changes_nothing(llama_dir, adapters, models, tmp_path):
    folder = shutil.copytree(adapters["usual"], tmp_path / "usual")
    async with serving(llama_dir) as backend:
        await backend.load_adapter("usual", folder, 1)
        file = folder / WEIGHTS_NAME
        with file.open("r+b") as opened:
            opened.write(b"\0" * file.stat().st_size)
            opened.truncate(64)
        requests = [asked(f"r{i}", prompt_of(6, i), "usual") for i in range(3)]
        responses = await generate_all(backend, requests)
    check_all(models, requests, responses)


async def test_an_adapter_that_is_not_finite_fails_its_own_requests(
    llama_dir, adapters, models, tmp_path
):
    folder = shutil.copytree(adapters["usual"], tmp_path / "broken")
    with_tensors(lambda t: t.update({name: x * float("nan") for name, x in t.items()}))(folder)
    async with serving(llama_dir, max_sequences=4) as backend:
        await load_all(backend, {"usual": adapters["usual"], "broken": folder})
        names = ["usual", "broken", None]
        requests = [asked(f"r{i}", prompt_of(6, i), name) for i, name in enumerate(names)]
        calls = [Call(backend, req) for req in requests]
        with pytest.raises(BackendError, match="version 1 of broken"):
            await calls[1].response()
        responses = [await calls[0].response(), await calls[2].response()]
        check_all(models, [requests[0], requests[2]], responses)
        await backend.load_adapter("broken", adapters["mlp"], 2)
        mended = asked("mended", prompt_of(6, 1), "broken")
        check_alone(models["mlp"], mended, await backend.generate(mended))
