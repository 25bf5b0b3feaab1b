"""The vLLM backend against a server with vLLM's shapes and manners, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import VLLMConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import (
    BackendError,
    ConfigError,
    Conflict,
    DataError,
    QueueFull,
    RequestTooLong,
    SyncError,
)
from headway.contracts.types import LLMDelta, LLMRequest
from inference_server.backends.base import make_backend
from inference_server.backends.vllm.backend import DirectoryUpdate, VLLMBackend
from tests.numeric.adapters import save_adapter
from tests.unit.inference_server import vllm_stand_in
from tests.unit.inference_server.vllm_stand_in import VLLMStandIn
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.transports.disk import make_local_publisher

PROMPT = (3, 4, 5)
LONG = 20


@contextlib.asynccontextmanager
async def serving(model: Path, *, version: int = 0, config: dict | None = None, **manners):
    """A stand-in and a backend that is attached to it."""
    engine = VLLMStandIn(**manners)
    await engine.start()
    settings = VLLMConfig(url=engine.url, health_interval_s=0.05, **(config or {}))
    backend = VLLMBackend(settings, ModelConfig(path=str(model)), version)
    try:
        await backend.start()
        yield backend, engine
    finally:
        await backend.aclose()
        await engine.close()


def request(prompt=PROMPT, rid="r", top_logprobs=0, logprob_start=None, **gconfig):
    options = {"max_new_tokens": LONG, "ignore_eos": True} | gconfig
    return LLMRequest(
        rid=rid,
        input_ids=prompt,
        gconfig=SamplingConfig(**options),
        top_logprobs=top_logprobs,
        logprob_start=logprob_start,
    )


async def begun(backend, engine, *requests, tokens=5, on_delta=None):
    """Requests that have sampled this many tokens and are held there."""
    engine.let(tokens)
    tasks = [asyncio.create_task(backend.generate(one, on_delta)) for one in requests]
    await engine.until(
        lambda: (
            len(engine.running) == len(requests)
            and all(len(one.tokens) == tokens for one in engine.running)
        )
    )
    return tasks


def update(llama_dir, version=1):
    return DirectoryUpdate(version, str(llama_dir))


# Generating.


async def test_tokens_logprobs_and_versions_come_with_an_answer(llama_dir):
    async with serving(llama_dir, version=7) as (backend, _):
        response = await backend.generate(request(top_logprobs=2))
    assert response.rid == "r"
    assert len(response.output_tokens) == LONG
    assert response.output_logprobs == [-0.5] * LONG
    assert response.version_runs == [(7, 0, LONG)]
    assert response.stop_reason == "length"
    assert response.stop_match is None
    assert response.top_logprobs[0] == [(0, -0.1), (1, -0.2)]
    assert response.cached_tokens == 0


async def test_deltas_make_up_the_response(llama_dir):
    deltas: list[LLMDelta] = []
    async with serving(llama_dir) as (backend, _):
        whole = await backend.generate(request())
        response = await backend.generate(request(top_logprobs=1), deltas.append)
    assert len(deltas) > 1
    assert [t for delta in deltas for t in delta.output_tokens] == response.output_tokens
    assert [p for delta in deltas for p in delta.output_logprobs] == response.output_logprobs
    assert [p for delta in deltas for p in delta.top_logprobs] == response.top_logprobs
    assert {delta.version for delta in deltas} == {0}
    assert response.output_tokens == whole.output_tokens
    assert response.cached_tokens == len(PROMPT) - 1
    assert 0.0 < response.ttft_s < response.latency_s


async def test_prompt_is_scored_from_the_position_asked_for(llama_dir):
    deltas: list[LLMDelta] = []
    async with serving(llama_dir) as (backend, _):
        response = await backend.generate(request(logprob_start=0, top_logprobs=1), deltas.append)
        tail = await backend.generate(request(logprob_start=2, max_new_tokens=0))
        none = await backend.generate(request(logprob_start=3))
    assert response.prompt_logprobs == [None, -1.0, -2.0]
    assert response.prompt_top_logprobs == [None, [(0, -0.1)], [(0, -0.1)]]
    assert [delta.output_tokens for delta in deltas] == [response.output_tokens]
    assert tail.prompt_logprobs == [-2.0]
    assert tail.output_tokens == [] == tail.version_runs
    assert tail.stop_reason == "length"
    assert none.prompt_logprobs == []


async def test_every_sampling_field_reaches_the_engine(llama_dir):
    sent = {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "stop_token_ids": (7, 8),
        "stop": ("end",),
        "ignore_eos": False,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {7: 100.0},
        "seed": 11,
    }
    async with serving(llama_dir) as (backend, engine):
        response = await backend.generate(request(**sent))
        body = engine.calls[-1][1]
    assert response.stop_reason == "stop"
    assert response.stop_match == 7
    assert len(response.output_tokens) == 1
    assert body["cache_salt"] == "0"
    assert body["sampling_params"] == {
        "max_tokens": 9,
        "min_tokens": 0,
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "stop_token_ids": [7, 8],
        "stop": ["end"],
        "ignore_eos": False,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.5,
        "logit_bias": {"7": 100.0},
        "seed": 11,
        "logprobs": 0,
        "prompt_logprobs": None,
        "skip_special_tokens": True,
        "detokenize": True,
    }
    assert set(SamplingConfig.model_fields) - set(sent) == {
        "min_new_tokens",
        "top_p",
        "top_k",
        "min_p",
        "json_schema",
        "regex",
    }


async def test_no_more_tokens_are_listed_than_there_are(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        await backend.generate(request(top_logprobs=64, max_new_tokens=1))
        assert engine.calls[-1][1]["sampling_params"]["logprobs"] == 61


async def test_end_of_sequence_is_named_though_vllm_does_not(llama_dir):
    async with serving(llama_dir) as (backend, _):
        response = await backend.generate(request(logit_bias={1: 100.0}, ignore_eos=False))
    assert (response.stop_reason, response.stop_match, response.output_tokens) == ("stop", 1, [1])


@pytest.mark.parametrize(
    ("mode", "gconfig", "field"),
    [
        ("processed_logprobs", {"top_p": 0.9}, "top_p=0.9"),
        ("processed_logprobs", {"top_k": 5, "min_p": 0.1}, "top_k=5, min_p=0.1"),
        ("raw_logprobs", {"temperature": 0.7}, "temperature=0.7"),
        ("raw_logprobs", {"logit_bias": {3: 1.0}, "temperature": 0.0}, "logit_bias"),
        ("processed_logprobs", {"min_new_tokens": 2, "temperature": 0.0}, "min_new_tokens=2"),
        ("processed_logprobs", {"temperature": 0.001}, "temperature=0.001"),
        ("processed_logprobs", {"temperature": 2.5}, "temperature=2.5"),
    ],
)
async def test_sampling_that_vllm_would_answer_otherwise_is_refused(
    llama_dir, mode, gconfig, field
):
    async with serving(llama_dir, logprobs_mode=mode) as (backend, engine):
        before = len(engine.calls)
        with pytest.raises(DataError, match=field):
            await backend.generate(request(**gconfig))
        assert len(engine.calls) == before


@pytest.mark.parametrize(
    ("mode", "gconfig"),
    [
        ("processed_logprobs", {"temperature": 0.7, "presence_penalty": 1.0}),
        ("processed_logprobs", {"temperature": 0.0, "top_p": 0.5}),
        ("raw_logprobs", {"top_p": 0.9, "top_k": 5, "min_new_tokens": 2}),
        ("raw_logprobs", {"temperature": 0.0}),
    ],
)
async def test_sampling_whose_logprobs_are_ours_is_served(llama_dir, mode, gconfig):
    async with serving(llama_dir, logprobs_mode=mode) as (backend, _):
        assert (await backend.generate(request(**gconfig))).stop_reason == "length"


async def test_request_that_no_engine_could_serve_stays_here(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        assert backend.limits.vocab_size == 61
        assert backend.limits.max_context == 256
        before = len(engine.calls)
        with pytest.raises(DataError, match="input_ids holds 61"):
            await backend.generate(request((61,)))
        with pytest.raises(RequestTooLong):
            await backend.generate(request(max_new_tokens=254))
        with pytest.raises(RequestTooLong, match="one more token"):
            await backend.generate(request((3,) * 256, max_new_tokens=0))
        assert len(engine.calls) == before


@pytest.mark.parametrize(
    ("status", "error"), [(400, DataError), (500, BackendError), (503, QueueFull)]
)
@pytest.mark.parametrize("is_streamed", [True, False])
async def test_refusal_of_the_engine_has_our_class(llama_dir, status, error, is_streamed):
    async with serving(llama_dir) as (backend, engine):
        engine.refuse["/inference/v1/generate"] = status
        with pytest.raises(error, match="had an error"):
            await backend.generate(request(), (lambda _: None) if is_streamed else None)
        engine.refuse.clear()
        assert (await backend.generate(request())).stop_reason == "length"


async def test_label_of_somebody_else_is_no_version(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        engine.label = "theirs"
        with pytest.raises(BackendError, match="labelled by another client"):
            await backend.generate(request())


# Aborting, cancelling, pausing.


async def test_abort_ends_one_request_with_its_tokens(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        one, other = await begun(backend, engine, request(rid="a"), request(rid="b"))
        await backend.abort("unknown")
        await backend.abort("a")
        response = await one
        assert response.stop_reason == "interrupt"
        assert response.version_runs == [(0, 0, 5)]
        assert len(response.output_tokens) == len(response.output_logprobs) == 5
        assert not other.done()
        await backend.abort(None)
        assert (await other).stop_reason == "interrupt"


async def test_abort_reaches_streams_and_what_waits_here(llama_dir):
    deltas: list[LLMDelta] = []
    async with serving(llama_dir) as (backend, engine):
        (streamed,) = await begun(backend, engine, request(rid="s"), on_delta=deltas.append)
        await backend.pause("in_place")
        waiting = asyncio.create_task(backend.generate(request(rid="w", logprob_start=1)))
        await asyncio.sleep(0)
        await backend.abort(None)
        assert (await streamed).stop_reason == "interrupt"
        response = await waiting
    assert sum(len(delta.output_tokens) for delta in deltas) == 5
    assert (response.stop_reason, response.output_tokens) == ("interrupt", [])
    assert response.prompt_logprobs == [None, None]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_cancelling_the_call_frees_the_engine(llama_dir, is_streamed):
    on_delta = (lambda _: None) if is_streamed else None
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request(), on_delta=on_delta)
        assert backend.load().running == 1
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await engine.until(lambda: not engine.running)
        assert engine.disconnected == 1
        assert backend.load().running == 0


async def test_frozen_requests_go_on_where_they_were(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        free = await backend.generate(request(seed=1))
        (task,) = await begun(backend, engine, request(seed=1))
        await backend.pause("in_place")
        engine.let()
        held = asyncio.create_task(backend.generate(request(rid="held")))
        await asyncio.sleep(0)
        assert backend.is_paused
        assert backend.load().queued == 1
        assert len(engine.running) == 1
        assert engine.running[0].num_recomputes == 0
        await backend.resume()
        response = await task
        assert response.output_tokens == free.output_tokens
        assert response.num_recomputes == 0
        assert (await held).stop_reason == "length"
        assert not backend.is_paused


async def test_retracted_requests_are_prefilled_again(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        await backend.pause("retract")
        assert engine.running[0].num_recomputes == 1
        engine.let()
        await backend.resume()
        response = await task
    assert response.num_recomputes == 1
    assert len(response.output_tokens) == LONG


async def test_pause_that_aborts_returns_once_all_is_answered(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        tasks = await begun(backend, engine, request(rid="a"), request(rid="b"))
        await backend.pause("abort")
        assert backend.load().running == 0
        assert {(await task).stop_reason for task in tasks} == {"interrupt"}
        await backend.resume()
        await backend.resume()
        engine.let()
        assert (await backend.generate(request())).stop_reason == "length"


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_request_that_meets_a_pause_of_somebody_else_waits(llama_dir, is_streamed):
    on_delta = (lambda _: None) if is_streamed else None
    async with serving(llama_dir) as (backend, engine):
        engine.paused = "abort"
        before = len(engine.calls)
        task = asyncio.create_task(backend.generate(request(), on_delta))
        await engine.until(lambda: len(engine.calls) >= before + 2)
        assert not task.done()
        engine.paused = None
        assert (await task).stop_reason == "length"


async def test_failed_pause_leaves_the_engine_going(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        engine.refuse["/pause"] = 500
        with pytest.raises(BackendError, match="/pause"):
            await backend.pause("in_place")
        assert not backend.is_paused
        assert backend.failure is None
        assert (await backend.generate(request())).stop_reason == "length"


async def test_flush_drops_prefixes_only_when_nothing_runs(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        assert not await backend.flush()
        engine.let()
        await task
        assert (await backend.generate(request())).cached_tokens == 2
        assert await backend.flush()
        assert (await backend.generate(request())).cached_tokens == 0


# Updating.


@pytest.mark.parametrize(
    ("policy", "pause", "recomputes"), [("keep", "keep", 0), ("recompute", "keep", 1)]
)
async def test_swap_under_running_requests_shows_in_their_versions(
    llama_dir, policy, pause, recomputes
):
    deltas: list[LLMDelta] = []
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        (streamed,) = [asyncio.create_task(backend.generate(request(rid="s"), deltas.append))]
        await engine.until(lambda: [len(one.tokens) for one in engine.running] == [5, 5])
        engine.calls.clear()
        assert await backend.swap(update(llama_dir), policy) == 2
        assert backend.version == 1
        assert engine.paused is None
        assert [one.num_recomputes for one in engine.running] == [recomputes] * 2
        engine.let()
        response, other = await task, await streamed
        verbs = engine.verbs()
    assert verbs[0] == f"/pause?mode={pause}&clear_cache=false"
    assert verbs[-3:] == ["/collective_rpc", "/update_weight_version", "/resume"]
    assert response.version_runs == other.version_runs == [(0, 0, 5), (1, 5, LONG)]
    assert response.num_recomputes == other.num_recomputes == recomputes
    stamped = [delta.version for delta in deltas for _ in delta.output_tokens]
    assert stamped == other.output_versions


async def test_swap_that_aborts_answers_with_the_old_version(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        tasks = await begun(backend, engine, request(rid="a"), request(rid="b"))
        assert await backend.swap(update(llama_dir), "abort") == 2
        for task in tasks:
            response = await task
            assert response.stop_reason == "interrupt"
            assert response.version_runs == [(0, 0, 5)]
        engine.let()
        assert (await backend.generate(request())).version_runs == [(1, 0, LONG)]


async def test_swap_that_drains_lets_requests_end_and_holds_new_ones(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        swap = asyncio.create_task(backend.swap(update(llama_dir), "drain"))
        await engine.until(lambda: engine.paused == "wait")
        held = asyncio.create_task(backend.generate(request(rid="held")))
        await asyncio.sleep(0)
        assert len(engine.running) == 1
        engine.let()
        assert (await task).version_runs == [(0, 0, LONG)]
        assert await swap == 1
        assert (await held).version_runs == [(1, 0, LONG)]


async def test_drain_that_is_given_up_goes_on_with_the_old_version(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        swap = asyncio.create_task(backend.swap(update(llama_dir), "drain"))
        await engine.until(lambda: engine.paused == "wait")
        swap.cancel()
        with pytest.raises(asyncio.CancelledError):
            await swap
        assert engine.paused is None
        engine.let()
        assert (await task).version_runs == [(0, 0, LONG)]
        assert backend.failure is None


async def test_swap_within_a_pause_leaves_it_paused(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        await backend.pause("in_place")
        engine.let()
        assert await backend.swap(update(llama_dir), "drain") == 1
        assert engine.paused == "keep"
        assert backend.is_paused
        await backend.resume()
        assert (await task).version_runs == [(0, 0, 5), (1, 5, LONG)]


async def test_new_version_never_reads_the_prefixes_of_an_old_one(llama_dir):
    async with serving(llama_dir) as (backend, _):
        await backend.generate(request())
        assert (await backend.generate(request())).cached_tokens == 2
        await backend.swap(update(llama_dir), "keep")
        assert (await backend.generate(request())).cached_tokens == 0


@pytest.mark.parametrize("path", ["/collective_rpc", "/update_weight_version"])
async def test_failure_in_an_update_is_for_good(llama_dir, path):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        engine.refuse[path] = 500
        with pytest.raises(SyncError, match="not loaded whole"):
            await backend.swap(update(llama_dir))
        assert path in backend.failure
        assert engine.paused is None
        with pytest.raises(BackendError, match="not loaded whole"):
            await task
        with pytest.raises(BackendError, match="not loaded whole"):
            await backend.generate(request())


async def test_failed_load_is_for_good_and_a_failed_pause_is_not(llama_dir, tmp_path):
    async with serving(llama_dir) as (backend, engine):
        (streamed,) = await begun(backend, engine, request(), on_delta=lambda _: None)
        engine.refuse["/pause"] = 500
        with pytest.raises(BackendError, match="/pause"):
            await backend.swap(update(llama_dir))
        assert (backend.failure, backend.version) == (None, 0)
        engine.refuse.clear()
        with pytest.raises(SyncError, match="version 1 was not loaded whole"):
            await backend.swap(DirectoryUpdate(1, str(tmp_path)))
        assert backend.version == 0
        assert engine.verbs()[-1] == "/resume"
        with pytest.raises(BackendError, match="not loaded whole"):
            await streamed


async def test_engine_that_dies_in_an_update_is_reported(llama_dir):
    config = {"health_timeout_s": 0.2}
    async with serving(llama_dir, config=config) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        engine.dies_at = "/collective_rpc"
        with pytest.raises(SyncError, match="collective_rpc gave no answer"):
            await backend.swap(update(llama_dir))
        assert backend.failure is not None
        with pytest.raises(BackendError):
            await backend.generate(request())
        engine.let()
        with pytest.raises(BackendError):
            await task


async def test_version_is_proven_before_the_engine_hears_of_it(llama_dir, tmp_path):
    weights = load_file(llama_dir / "model.safetensors")
    publisher = make_local_publisher(str(tmp_path))
    good = publisher.publish(1, weights.items())
    other = publisher.publish(2, [*weights.items(), ("extra", torch.zeros(1))])
    torn = publisher.publish(3, weights.items())
    shard = Path(torn.path) / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    publisher.close()
    reader = make_receiver(ReceiverConfig(allow=(str(tmp_path),))).within(Deadline(10.0))
    async with serving(llama_dir) as (backend, engine):
        staged = await asyncio.to_thread(backend.stage, good, reader)
        assert (staged.version, staged.digest, staged.held.digest) == (1, good.digest, good.digest)
        for bad in (other, torn):
            with pytest.raises(SyncError):
                await asyncio.to_thread(backend.stage, bad, reader)
        assert "/collective_rpc" not in engine.verbs()
        await backend.swap(staged)
        assert engine.weights_path == good.path
        assert backend.version == 1


# Coming and going.


async def test_attached_engine_that_was_updated_before_tells_its_version(llama_dir):
    engine = VLLMStandIn()
    await engine.start()
    engine.label = "12"
    config = VLLMConfig(url=engine.url)
    backend = make_backend(config, ModelConfig(path=str(llama_dir)), 0, None)
    await backend.start()
    assert backend.version == 12
    await backend.pause("in_place")
    await backend.aclose()
    assert engine.paused is None  # left as it was found
    await engine.close()


@pytest.mark.parametrize(
    ("manners", "label", "error", "says"),
    [
        ({"dev_mode": False}, "default", BackendError, "VLLM_SERVER_DEV_MODE=1"),
        ({"scale_out": False}, "default", ConfigError, "--enable-scale-out"),
        ({"max_model_len": None}, "default", BackendError, "names no max_model_len"),
        ({}, "theirs", BackendError, "labelled 'theirs'"),
        ({"logprobs_mode": "raw_logits"}, "default", ConfigError, "raw_logits"),
    ],
)
async def test_engine_that_cannot_keep_the_contract_is_refused(
    llama_dir, manners, label, error, says
):
    engine = VLLMStandIn(**manners)
    engine.label = label
    await engine.start()
    backend = VLLMBackend(VLLMConfig(url=engine.url), ModelConfig(path=str(llama_dir)), 0)
    with pytest.raises(error, match=says):
        await backend.start()
    await engine.close()


def test_model_that_vllm_cannot_have_is_refused(llama_dir, tmp_path):
    with pytest.raises(ConfigError, match="init_from_scratch"):
        VLLMBackend(VLLMConfig(), ModelConfig(path=str(llama_dir), init_from_scratch=True), 0)
    with pytest.raises(ConfigError, match=r"set model\.path"):
        VLLMBackend(VLLMConfig(), ModelConfig(path=str(tmp_path)), 0)


async def test_figures_come_from_the_engine(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        async with asyncio.timeout(5.0):
            while backend.load().kv_capacity_tokens == 0:  # noqa: ASYNC110 - nobody announces it
                await asyncio.sleep(0.01)
        load = backend.load()
        engine.let()
        await task
        after = backend.load()
    assert (load.running, load.queued) == (1, 0)
    assert load.kv_capacity_tokens == 16_000
    assert load.kv_tokens == 4_000
    assert load.kv_usage == 0.25
    assert load.prefill_tokens == 100
    assert 0.0 < load.busy_s <= load.uptime_s
    assert after.running == 0
    assert after.generated_tokens == LONG


@pytest.fixture
def vllm_python(tmp_path: Path) -> str:
    """An interpreter whose `vllm` is the stand-in."""
    script = tmp_path / "python"
    root = Path(vllm_stand_in.__file__).parents[3]
    script.write_text(
        f"#!/bin/sh\nexport PYTHONPATH={root}\nshift 2\nexec {sys.executable} "
        f'{vllm_stand_in.__file__} "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


async def test_managed_engine_is_started_watched_and_ended(llama_dir, vllm_python, tmp_path):
    config = VLLMConfig(
        python=vllm_python,
        log_file=str(tmp_path / "engine.log"),
        args={"--max-num-seqs": 4},
        start_timeout_s=30.0,
        health_interval_s=0.05,
    )
    backend = VLLMBackend(config, ModelConfig(path=str(llama_dir)), 3)
    await backend.start()
    try:
        response = await backend.generate(request(temperature=0.5))
        assert response.version_runs == [(3, 0, LONG)]
        await backend.pause("in_place")
        task = asyncio.create_task(backend.generate(request()))
        await asyncio.sleep(0)
        os.kill(backend._engine.process.pid, 9)
        with pytest.raises(BackendError, match="status -9"):
            await task
        assert "status -9" in backend.failure
    finally:
        await backend.aclose()


async def test_close_fails_what_runs(llama_dir):
    async with serving(llama_dir) as (backend, engine):
        (task,) = await begun(backend, engine, request())
        await backend.aclose()
        with pytest.raises(BackendError, match="closed"):
            await task


async def test_a_sampling_mask_is_refused_by_name_and_only_where_something_is_cut(llama_dir):
    async with serving(llama_dir) as (backend, _):
        for gconfig, refused in (({"min_p": 0.1}, True), ({}, False)):
            asked = request(**gconfig).model_copy(update={"sampling_mask": True})
            if refused:
                with pytest.raises(DataError, match="the backend vllm reports none; cut nothing"):
                    await backend.generate(asked)
            else:
                assert (await backend.generate(asked)).sampling_mask is None


# Adapters.


@pytest.fixture(scope="module")
def adapter(llama_dir, tmp_path_factory):
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"]}
    return save_adapter(tmp_path_factory.mktemp("adapters") / "a", llama_dir, 0, **lora)


def adapted(rid="a", **fields):
    return request(rid=rid, **fields).model_copy(update={"adapter": "a"})


async def test_an_adapter_has_versions_of_its_own_and_a_name_per_version(llama_dir, adapter):
    config = {"max_adapters": 1}
    async with serving(llama_dir, version=7, config=config) as (backend, engine):
        await backend.load_adapter("a", adapter, 3)
        response = await backend.generate(adapted())
        assert response.version_runs == [(3, 0, LONG)]
        assert (await backend.generate(request())).version_runs == [(7, 0, LONG)]
        deltas: list[LLMDelta] = []
        (running,) = await begun(backend, engine, adapted(), on_delta=deltas.append)
        await backend.load_adapter("a", adapter, 4)  # while the one before it still works
        assert len(engine.adapters) == 2 and dict(backend.adapters) == {"a": 4}
        engine.let()
        response = await running
        assert response.version_runs == [(3, 0, LONG)]
        assert {delta.version for delta in deltas} == {3}
        await engine.until(lambda: (len(engine.adapters), engine.places) == (1, {2}))
        assert (await backend.generate(adapted())).version_runs == [(4, 0, LONG)]
        with pytest.raises(Conflict, match="max_adapters=1"):
            await backend.load_adapter("b", adapter, 1)
    assert engine.adapters == {} and not engine.places, "an engine that goes on is left as it was"


async def test_unloading_an_adapter_ends_its_requests_alone(llama_dir, adapter):
    async with serving(llama_dir, config={"max_adapters": 2}) as (backend, engine):
        await backend.load_adapter("a", adapter, 1)
        ended, goes_on = await begun(backend, engine, adapted(), request())
        await backend.unload_adapter("a")
        response = await ended
        assert (response.stop_reason, response.version_runs) == ("interrupt", [(1, 0, 5)])
        engine.let()
        assert (await goes_on).stop_reason == "length"
        assert engine.adapters == {} == dict(backend.adapters)
        with pytest.raises(DataError, match="'a' is not loaded"):
            await backend.generate(adapted())


async def test_an_adapter_that_the_engine_refuses_is_not_served(llama_dir, adapter):
    async with serving(llama_dir, config={"max_adapters": 2}) as (backend, engine):
        engine.refuse["/v1/load_lora_adapter"] = 400
        with pytest.raises(SyncError, match="/v1/load_lora_adapter with 400"):
            await backend.load_adapter("a", adapter, 1)
        with pytest.raises(SyncError):
            await backend.load_adapter("a", llama_dir, 1)  # no adapter
        assert dict(backend.adapters) == {} == engine.adapters
