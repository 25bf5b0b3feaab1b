"""Routed experts of SGLang and vLLM: asked for where there are some, read as each engine packs them."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import SGLangConfig, VLLMConfig
from headway.contracts.errors import BackendError, ConfigError, DataError, SyncError
from headway.contracts.routed_experts import RoutedExperts
from headway.contracts.types import LLMRequest, LLMResponse, WeightUpdateMeta
from inference_server.backends.engine_experts import FLAG, EngineExperts
from inference_server.backends.sglang import wire as sglang_wire
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.backends.sglang.updates import FolderUpdate
from inference_server.backends.sglang.wire import EngineOutput
from inference_server.backends.vllm import wire as vllm_wire
from inference_server.backends.vllm.backend import VLLMBackend
from tests.numeric.models import save_model
from tests.unit.inference_server.sglang_stand_in import StandIn
from tests.unit.inference_server.test_sglang_backend import attached, begin
from tests.unit.inference_server.test_vllm_backend import (
    begun,
    serving,
    vllm_python,  # noqa: F401 - a fixture
)
from tests.unit.inference_server.vllm_stand_in import packed, shape
from weight_sync.channel import StagedWeights
from weight_sync.checkpoint import ExpertCounts

NUM_EXPERTS, NUM_LAYERS, TOP_K = 300, 3, 2
"""More experts than a byte can name; the first layer is dense."""
PROMPT = (3, 4, 5)
COUNT = 6


@pytest.fixture(scope="module")
def mixture_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    config = {
        "vocab_size": 60,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "num_hidden_layers": NUM_LAYERS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = ["0.mlp.up_proj", "1.mlp.experts.7.up_proj", "2.mlp.experts.0.up_proj"]
    weights = {f"model.layers.{name}.weight": torch.zeros(4) for name in names}
    save_file(weights, folder / "a.safetensors")
    return folder


@pytest.fixture
def experts(mixture_dir: Path) -> EngineExperts:
    """Of an engine that reports them."""
    return EngineExperts.of_model(str(mixture_dir), is_reported=True)


def chosen(num_positions: int = 64, seed: int = 0) -> NDArray[np.int32]:
    """Experts of every layer; for the dense one, an engine sends what happens to be there."""
    drawn = np.random.default_rng(seed).integers(0, NUM_EXPERTS, (num_positions, NUM_LAYERS, TOP_K))
    return drawn.astype(np.int32)


def asked(**extra) -> LLMRequest:
    gconfig = SamplingConfig(ignore_eos=True, max_new_tokens=COUNT)
    fields = {"rid": "r", "input_ids": PROMPT, "gconfig": gconfig, "routed_experts": True}
    return LLMRequest(**(fields | extra))


# What both engines share.


def test_a_model_directory_tells_the_counts_and_the_layers(mixture_dir, llama_dir):
    assert EngineExperts.of_model(str(mixture_dir), True) == EngineExperts(
        ExpertCounts(NUM_EXPERTS, NUM_LAYERS, TOP_K), (1, 2), is_reported=True
    )
    assert EngineExperts.of_model(str(llama_dir), True) == EngineExperts()


def test_a_directory_that_does_not_say_how_many_compute_a_token_is_refused(tmp_path):
    config = {"vocab_size": 60, "num_hidden_layers": 1, "num_local_experts": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="4 experts and no num_experts_per_tok"):
        EngineExperts.of_model(str(tmp_path), True)


def test_they_are_wanted_of_a_mixture_by_those_who_ask(experts):
    assert experts.are_wanted(asked())
    assert not experts.are_wanted(asked(routed_experts=False))
    assert not EngineExperts().are_wanted(asked())


def test_an_engine_that_reports_none_refuses_with_the_flag_that_it_needs(mixture_dir):
    silent = EngineExperts.of_model(str(mixture_dir), is_reported=False)
    assert FLAG == "--enable-return-routed-experts"
    message = f"request r asks for its routed experts.*{FLAG}.*algorithm.routed_experts=ignore"
    with pytest.raises(DataError, match=message):
        silent.are_wanted(asked())
    assert not silent.are_wanted(asked(routed_experts=False))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32])
def test_a_response_holds_the_layers_with_experts_of_all_tokens_but_the_last(experts, kind):
    ids = (chosen(8) % 200).astype(kind)
    for sent in (ids, ids.reshape(-1), ids.reshape(8, -1)):
        found = experts.of_response(sent, 9)
        assert found == RoutedExperts(ids[:, 1:].astype(np.int16))
    assert found.experts.dtype == np.int16


def test_a_response_that_was_cut_holds_no_more_than_its_tokens(experts):
    ids = chosen(12)
    assert experts.of_response(ids, 9) == RoutedExperts(ids[:8, 1:].astype(np.int16))


def test_what_an_engine_did_not_send_is_not_there(experts):
    assert experts.of_response(None, 9) is None
    assert EngineExperts().of_response(chosen(8), 9) is None


def test_a_part_of_a_token_is_refused(experts):
    with pytest.raises(BackendError, match=r"47 routed experts.*3 layers x 2 experts"):
        experts.of_response(chosen(8).reshape(-1)[:-1], 9)


# SGLang.


def output_with(found: str | None) -> EngineOutput:
    meta = {} if found is None else {"routed_experts": found}
    return EngineOutput([7], meta)


def test_sglang_packs_them_as_integers_of_four_bytes():
    ids = chosen(5)
    sent = base64.b64encode(ids.astype("<i4").tobytes()).decode()
    assert np.array_equal(sglang_wire.expert_ids_of(output_with(sent)), ids.reshape(-1))
    assert sglang_wire.expert_ids_of(output_with(None)) is None


@pytest.mark.parametrize("sent", ["?", "AAAAA", "AAAA", 7])  # the third: 3 bytes
def test_damaged_experts_of_sglang_are_told(sent):
    with pytest.raises(BackendError, match="SGLang sent routed experts that cannot be read"):
        sglang_wire.expert_ids_of(output_with(sent))


def reporting_sglang() -> StandIn:
    engine = StandIn()
    engine.info["enable_return_routed_experts"] = True
    engine.experts = chosen()
    return engine


async def served_by_sglang(backend: SGLangBackend, engine: StandIn, req: LLMRequest, **how):
    [task] = await begin(backend, engine, req, **how)
    body = engine.running[0].body
    engine.step(COUNT + 1)
    return body, await task


async def test_sglang_is_asked_for_them_where_the_caller_asks(mixture_dir):
    engine = reporting_sglang()
    expected = RoutedExperts(engine.experts[: len(PROMPT) + COUNT - 1, 1:].astype(np.int16))
    async with attached(mixture_dir, engine) as backend:
        for how in ({}, {"on_delta": lambda _: None}):
            body, response = await served_by_sglang(backend, engine, asked(), **how)
            assert body["return_routed_experts"] is True
            assert response.routed_experts == expected
        body, response = await served_by_sglang(backend, engine, asked(routed_experts=False))
        assert "return_routed_experts" not in body
        assert response.routed_experts is None


async def test_an_old_sglang_that_answers_at_once_is_asked_too(mixture_dir):
    engine = reporting_sglang()
    engine.can_thin_streams = False
    async with attached(mixture_dir, engine) as backend:
        body, response = await served_by_sglang(backend, engine, asked())
    assert "stream" not in body
    assert len(response.routed_experts) == len(PROMPT) + COUNT - 1


async def test_a_dense_model_on_sglang_has_none_to_ask_for(llama_dir):
    engine = reporting_sglang()
    async with attached(llama_dir, engine) as backend:
        body, response = await served_by_sglang(backend, engine, asked())
    assert "return_routed_experts" not in body
    assert response.routed_experts is None


async def test_an_sglang_that_reports_none_refuses_before_the_engine_hears(mixture_dir):
    engine = StandIn()
    async with attached(mixture_dir, engine) as backend:
        with pytest.raises(DataError, match=FLAG):
            await backend.generate(asked())
        assert engine.asked("/generate") == []
        _, response = await served_by_sglang(backend, engine, asked(routed_experts=False))
        assert response.stop_reason == "length"


async def test_a_stop_that_sglang_does_not_know_cuts_the_experts_too(mixture_dir):
    engine = reporting_sglang()
    gconfig = SamplingConfig(ignore_eos=True, max_new_tokens=40, stop_token_ids=(8,))
    async with attached(mixture_dir, engine) as backend:
        [task] = await begin(backend, engine, asked(gconfig=gconfig), on_delta=lambda _: None)
        engine.step(7)
        response = await task
    assert response.output_tokens == [6, 7, 8]
    assert len(response.routed_experts) == len(PROMPT) + 2


async def test_a_request_that_sglang_never_began_has_none(mixture_dir):
    engine = reporting_sglang()
    async with attached(mixture_dir, engine) as backend:
        await backend.pause("in_place")
        waiting = asyncio.create_task(backend.generate(asked()))
        await asyncio.sleep(0)
        await backend.abort(None)
        response = await waiting
    assert (response.stop_reason, response.routed_experts) == ("interrupt", None)


# vLLM.


def answer_with(found: str | None) -> dict:
    answer = shape("generate")
    answer["choices"][0]["weight_versions"][0]["version"] = "4"
    answer["choices"][0]["routed_experts"] = found
    return answer


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.int32])
def test_vllm_packs_them_as_a_file_of_numpy(kind):
    ids = (chosen(5) % 200).astype(kind)
    part = vllm_wire.read_chunk(answer_with(packed(ids)), 0)
    assert np.array_equal(part.experts, ids)
    assert part.experts.dtype == kind
    assert vllm_wire.read_chunk(answer_with(None), 0).experts is None


def test_experts_of_an_unfinished_chunk_are_not_looked_at_and_those_at_the_end_stay():
    whole = vllm_wire.OutputChunk()
    begun_chunk = answer_with("?")
    begun_chunk["choices"][0]["finish_reason"] = None
    for event in (begun_chunk, answer_with(packed(chosen(5))), {"choices": [], "usage": {}}):
        whole.extend(vllm_wire.read_chunk(event, 0))
    assert np.array_equal(whole.experts, chosen(5))


@pytest.mark.parametrize(
    "sent",
    ["?", "AAAAA", "AAAA", packed(chosen(5))[:80], packed(np.array([None, 1])), 7],
    ids=["no base64", "odd base64", "no file", "torn", "objects", "a number"],
)
def test_damaged_experts_of_vllm_are_told(sent):
    with pytest.raises(BackendError, match="vLLM sent routed experts that cannot be read"):
        vllm_wire.read_chunk(answer_with(sent), 0)


async def test_vllm_tells_them_with_whole_answers_and_at_the_end_of_streams(mixture_dir):
    ids = chosen().astype(np.uint16)
    expected = RoutedExperts(ids[: len(PROMPT) + COUNT - 1, 1:].astype(np.int16))
    async with serving(mixture_dir, vocab_size=60, experts=ids) as (backend, _):
        assert (await backend.generate(asked())).routed_experts == expected
        assert (await backend.generate(asked(), lambda _: None)).routed_experts == expected


async def test_the_experts_of_a_prompt_that_is_only_scored_are_those_of_the_prompt(mixture_dir):
    ids = chosen().astype(np.uint16)
    scored = asked(gconfig=SamplingConfig(max_new_tokens=0), logprob_start=0)
    async with serving(mixture_dir, vocab_size=60, experts=ids) as (backend, _):
        response = await backend.generate(scored)
    assert response.output_tokens == []
    assert response.routed_experts == RoutedExperts(ids[: len(PROMPT) - 1, 1:].astype(np.int16))


async def test_an_interrupted_request_on_vllm_has_those_of_what_it_has(mixture_dir):
    ids = chosen().astype(np.uint16)
    async with serving(mixture_dir, vocab_size=60, experts=ids) as (backend, engine):
        [task] = await begun(backend, engine, asked(), tokens=2)
        await backend.abort("r")
        response = await task
    assert response.stop_reason == "interrupt"
    assert len(response.routed_experts) == len(PROMPT) + 2 - 1


async def test_a_vllm_that_reports_none_refuses_before_the_engine_hears(mixture_dir, llama_dir):
    async with serving(mixture_dir, vocab_size=60) as (backend, engine):
        before = len(engine.calls)
        with pytest.raises(DataError, match=FLAG):
            await backend.generate(asked())
        assert len(engine.calls) == before
        assert (await backend.generate(asked(routed_experts=False))).routed_experts is None
    async with serving(llama_dir) as (backend, _):
        assert (await backend.generate(asked())).routed_experts is None


@pytest.mark.parametrize("is_given", [True, False])
async def test_the_flag_of_a_vllm_of_our_own_is_what_it_reports_by(
    mixture_dir,
    vllm_python,  # noqa: F811 - the fixture
    is_given,
):
    """The stand-in's page says nothing of it."""
    args = {FLAG: True} if is_given else {}
    config = VLLMConfig(python=vllm_python, args=args, start_timeout_s=30.0)
    backend = VLLMBackend(config, ModelConfig(path=str(mixture_dir)), 3)
    await backend.start()
    try:
        assert backend._engine.experts.is_reported == is_given
        assert backend._engine.takes_versions
    finally:
        await backend.aclose()


async def test_the_other_name_of_the_flag_is_refused(mixture_dir):
    """vLLM would read it, and we would not see it."""
    flag = "--enable_return_routed_experts"
    backend = VLLMBackend(VLLMConfig(args={flag: True}), ModelConfig(path=str(mixture_dir)), 3)
    with pytest.raises(ConfigError, match=f"sets {flag}; set {FLAG} instead"):
        await backend.start()


# Versions of mixtures on vLLM.


class Reader:
    """Vouches for any version."""

    def stage(self, meta: WeightUpdateMeta, expected) -> StagedWeights:
        return StagedWeights(meta.version, "d", {})


@pytest.mark.parametrize(
    ("kind", "device", "is_taken"),
    [
        ("qwen3_moe", "cpu", False),
        ("mixtral", "cpu", False),
        ("qwen3_moe", "cuda", True),
        ("llama", "cpu", True),
    ],
)
async def test_vllm_on_a_cpu_refuses_versions_of_mixtures_and_serves_on(
    tmp_path, kind, device, is_taken
):
    model = save_model(tmp_path / "model", kind)
    meta = WeightUpdateMeta(1, str(model))
    async with serving(model, device=device) as (backend, engine):
        assert backend._engine.takes_versions == is_taken
        if is_taken:
            await backend.swap(backend.stage(meta, Reader()))
        else:
            with pytest.raises(SyncError, match="vLLM on a CPU packs the weights of experts once"):
                backend.stage(meta, Reader())
        response: LLMResponse = await backend.generate(asked(routed_experts=False))
        assert ("/collective_rpc" in engine.verbs()) == is_taken
    assert response.version_runs == [(int(is_taken), 0, COUNT)]
    assert backend.failure is None or "closed" in backend.failure


async def test_a_vllm_that_does_not_tell_its_device_is_taken_for_a_gpu(mixture_dir):
    async with serving(mixture_dir, vocab_size=60, device=None) as (backend, _):
        assert backend._engine.takes_versions


def test_sglang_takes_versions_of_mixtures(mixture_dir):
    backend = SGLangBackend(SGLangConfig(), ModelConfig(path=str(mixture_dir)), 0)
    assert backend.stage(WeightUpdateMeta(1, "/v1"), Reader()) == FolderUpdate(1, "/v1", "d")
