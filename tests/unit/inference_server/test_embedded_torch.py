"""Limits, stops, cancellation and the end of the embedded backend."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from pydantic import ValidationError
from transformers import Gemma2Config, Gemma2ForCausalLM

from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import (
    BackendError,
    ConfigError,
    DataError,
    RequestTooLong,
    SyncError,
)
from inference_server.backends.base import BACKENDS
from inference_server.backends.embedded import decoder, swaps
from inference_server.backends.embedded.backend import EmbeddedTorchBackend
from tests.numeric.backends import DEADLINE_S, make_backend, prompt_of, request, serving, stage
from tests.numeric.models import CONTEXT, EOS, VOCAB_SIZE, save_model
from tests.waiting import until
from weight_sync.channel import StagedWeights

PROMPT = prompt_of(6, 0)

COUNTS_HELPERS = """
import os, pathlib, sys, torch
from tests.numeric.backends import make_backend

backend = make_backend(pathlib.Path(sys.argv[1]), num_threads=2)
before = set(os.listdir("/proc/self/task"))
torch.zeros(1 << 20).add_(1)
print(len(set(os.listdir("/proc/self/task")) - before))
"""
"""Prints the helpers that OpenMP starts for a sum on the main thread."""


@pytest.fixture
async def backend(llama_dir):
    async with serving(llama_dir) as backend:
        yield backend


async def generate(backend, name="r", prompt=PROMPT, **gconfig):
    call = backend.generate(request(name, list(prompt), **gconfig))
    return await asyncio.wait_for(call, DEADLINE_S)


async def handed_over(call):
    """A task that has come as far as it gets without the engine."""
    task = asyncio.create_task(call)
    await asyncio.sleep(0)
    return task


async def sample_until_eos(backend, **gconfig):
    """Try prompts and seeds until one samples the end of sequence."""
    for seed in range(40):
        prompt = prompt_of(1 + seed % 9, seed)
        response = await generate(
            backend, prompt=prompt, ignore_eos=False, max_new_tokens=60, seed=seed, **gconfig
        )
        if response.stop_reason == "stop":
            return seed, prompt, response
    raise AssertionError("no sequence ended")


async def test_the_end_of_sequence_stops_and_is_part_of_the_output(backend):
    _, _, response = await sample_until_eos(backend)
    assert response.output_tokens[-1] == EOS
    assert EOS not in response.output_tokens[:-1]
    assert len(response.output_logprobs) == len(response.output_tokens)


async def test_ignore_eos_goes_on_past_it_with_the_same_tokens(backend):
    seed, prompt, stopped = await sample_until_eos(backend)
    response = await generate(backend, prompt=prompt, max_new_tokens=60, seed=seed)
    length = len(stopped.output_tokens)
    assert response.output_tokens[:length] == stopped.output_tokens
    assert len(response.output_tokens) == 60
    assert response.stop_reason == "length"


async def test_stop_token_ids_stop_besides_the_end_of_sequence(backend):
    free = await generate(backend, max_new_tokens=40, seed=1)
    stop = free.output_tokens[10]
    response = await generate(backend, max_new_tokens=40, seed=1, stop_token_ids=(stop,))
    first = free.output_tokens.index(stop)
    assert response.output_tokens == free.output_tokens[: first + 1]
    assert response.stop_reason == "stop"


async def test_no_stop_token_is_sampled_before_min_new_tokens(backend):
    free = await generate(backend, max_new_tokens=40, temperature=0.0)
    stop = free.output_tokens[2]
    response = await generate(
        backend, max_new_tokens=40, min_new_tokens=20, temperature=0.0, stop_token_ids=(stop,)
    )
    assert stop not in response.output_tokens[:20]
    assert len(response.output_tokens) >= 20


async def test_max_new_tokens_is_a_length_stop(backend):
    response = await generate(backend, max_new_tokens=1)
    assert len(response.output_tokens) == 1
    assert response.stop_reason == "length"
    assert 0 <= response.ttft_s <= response.latency_s


async def test_a_stop_on_the_last_allowed_token_is_a_stop(backend):
    free = await generate(backend, max_new_tokens=5, temperature=0.0)
    last = free.output_tokens[-1]
    size = free.output_tokens.index(last) + 1
    response = await generate(backend, max_new_tokens=size, temperature=0.0, stop_token_ids=(last,))
    assert response.stop_reason == "stop"


async def test_a_request_that_fills_the_context_runs_and_one_token_more_is_refused(backend):
    response = await generate(backend, max_new_tokens=CONTEXT - len(PROMPT))
    assert len(response.output_tokens) == CONTEXT - len(PROMPT)
    with pytest.raises(RequestTooLong, match=f"6 prompt tokens .* the context of {CONTEXT}"):
        await generate(backend, max_new_tokens=CONTEXT - len(PROMPT) + 1)


@pytest.mark.parametrize("field", ["input_ids", "stop_token_ids"])
async def test_a_token_outside_of_the_vocabulary_is_a_data_error(backend, field):
    with pytest.raises(DataError, match=f"{field} holds {VOCAB_SIZE}"):
        if field == "input_ids":
            await generate(backend, prompt=[3, VOCAB_SIZE])
        else:
            await generate(backend, stop_token_ids=(VOCAB_SIZE,))
    assert len((await generate(backend)).output_tokens) == 20


async def test_a_cancelled_request_frees_its_slot_and_the_others_go_on(llama_dir):
    async with serving(llama_dir, max_sequences=2) as backend:
        long = {"max_new_tokens": CONTEXT - len(PROMPT)}
        doomed = asyncio.create_task(generate(backend, "doomed", **long))
        survivor = asyncio.create_task(generate(backend, "survivor", seed=1, **long))
        waiting = asyncio.create_task(generate(backend, "waiting", seed=2))
        given_up = asyncio.create_task(generate(backend, "given-up"))
        await until(lambda: backend.load().running == 2)
        doomed.cancel()
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        await waiting
        response = await survivor
        await until(lambda: backend.load().running == backend.load().queued == 0)
        alone = await generate(backend, "alone", seed=1, **long)
        assert response.output_tokens == alone.output_tokens
        assert backend.load().generated_tokens < 3 * CONTEXT + 20


async def test_close_fails_running_and_waiting_requests(llama_dir):
    backend = make_backend(llama_dir, max_sequences=2)
    await backend.start()
    tasks = [asyncio.create_task(generate(backend, f"r{i}", max_new_tokens=240)) for i in range(4)]
    await until(lambda: backend.load().running == 2)
    await backend.aclose()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BackendError] * 4
    with pytest.raises(BackendError, match="closed"):
        await generate(backend)
    with pytest.raises(BackendError, match="closed"):
        await backend.swap(stage(1, llama_dir))


async def test_close_before_the_start_fails_what_was_handed_over(llama_dir):
    backend = make_backend(llama_dir)
    task = await handed_over(backend.generate(request("r", PROMPT)))
    await backend.aclose()
    with pytest.raises(BackendError, match="closed"):
        await task


async def test_closing_twice_is_closing_once(llama_dir):
    backend = make_backend(llama_dir)
    await backend.start()
    await backend.aclose()
    await backend.aclose()
    assert backend.failure is None


async def test_a_swap_whose_caller_gave_up_is_not_applied_and_harms_nobody(llama_dir):
    backend = make_backend(llama_dir)
    swap = await handed_over(backend.swap(backend.model.fit(stage(1, llama_dir))))
    swap.cancel()
    with pytest.raises(asyncio.CancelledError):
        await swap
    await backend.start()
    response = await generate(backend)
    assert response.version_runs == [(0, 0, 20)]
    assert await backend.swap(stage(2, llama_dir)) == 0
    assert backend.version == 2
    await backend.aclose()


async def test_a_version_that_this_backend_did_not_stage_is_refused(backend):
    @dataclass
    class Foreign:
        version: int

    with pytest.raises(SyncError, match="Foreign was not staged by this backend"):
        await backend.swap(Foreign(1))
    assert (await generate(backend)).version_runs == [(0, 0, 20)]


async def test_an_engine_that_dies_in_a_swap_tells_every_caller(llama_dir):
    backend = make_backend(llama_dir)
    await backend.start()
    running = asyncio.create_task(generate(backend, max_new_tokens=240))
    await until(lambda: backend.load().running == 1)
    assert backend.failure is None
    with pytest.raises(BackendError, match="the engine died: KeyError"):
        await asyncio.wait_for(backend.swap(StagedWeights(1, "0" * 64, {})), DEADLINE_S)
    with pytest.raises(BackendError, match="the engine died"):
        await running
    assert backend.version == 0
    for call in (generate(backend), backend.pause("in_place"), backend.abort(None)):
        with pytest.raises(BackendError, match="the engine died: KeyError"):
            await call
    assert "KeyError" in backend.failure
    await backend.aclose()


async def test_an_engine_that_dies_in_a_prefill_tells_the_requests_of_that_prefill(llama_dir):
    backend = make_backend(llama_dir)

    def fail(*_):
        raise MemoryError("no room")

    backend.model.module.register_forward_pre_hook(fail)
    await backend.start()
    with pytest.raises(BackendError, match="no room"):
        await generate(backend)
    assert "no room" in backend.failure
    await backend.aclose()


async def test_a_device_that_fails_for_good_leaves_nobody_waiting(llama_dir):
    """As after an illegal memory access on a GPU: nothing in its memory can be touched again."""
    backend = make_backend(llama_dir)

    def fail(*_):
        for slab in backend._decode_loop.cache.slabs:
            slab.store = None
        raise RuntimeError("device lost")

    await backend.start()
    tasks = [asyncio.create_task(generate(backend, f"r{i}", max_new_tokens=240)) for i in range(6)]
    await until(lambda: backend.load().generated_tokens > 20)
    backend.model.module.register_forward_pre_hook(fail)
    outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), DEADLINE_S)
    assert {type(outcome) for outcome in outcomes} == {BackendError}
    assert "device lost" in backend.failure
    await backend.aclose()


async def test_orders_behind_the_one_that_kills_the_engine_are_answered(llama_dir):
    backend = make_backend(llama_dir)

    def fail():
        raise RuntimeError("bad order")

    backend._decode_loop._orders.put(fail)
    request_task = await handed_over(backend.generate(request("r", PROMPT)))
    swap_task = await handed_over(backend.swap(backend.model.fit(stage(1, llama_dir))))
    await backend.start()
    for task in (request_task, swap_task):
        with pytest.raises(BackendError, match="bad order"):
            await asyncio.wait_for(task, DEADLINE_S)
    await backend.aclose()


async def test_a_reader_of_deltas_that_raises_ends_its_own_request_only(backend):
    def fail(delta):
        raise KeyError("reader")

    long = {"max_new_tokens": 100}
    calls = [
        backend.generate(request("bad", PROMPT, **long), fail),
        backend.generate(request("good", PROMPT, **long)),
    ]
    bad, good = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE_S)
    assert isinstance(bad, KeyError)
    assert len(good.output_tokens) == 100
    await until(lambda: backend.load().running == 0)
    assert backend.load().generated_tokens < 200


async def test_load_counts_tokens_and_the_work_of_the_engine(backend):
    assert backend.load().generated_tokens == 0
    await generate(backend, max_new_tokens=7)
    await until(lambda: backend.load().busy_s > 0)
    load = backend.load()
    assert load.generated_tokens == 7
    assert load.running == load.queued == 0
    assert 0 < load.busy_s <= load.uptime_s


async def test_two_event_loops_share_one_backend(backend):
    def elsewhere():
        return asyncio.run(generate(backend, "elsewhere", seed=3))

    here, there = await asyncio.gather(
        generate(backend, "here", seed=3), asyncio.to_thread(elsewhere)
    )
    assert here.output_tokens == there.output_tokens


def test_parameters_name_every_tensor_that_a_version_must_bring(llama_dir):
    backend = make_backend(llama_dir)
    assert dict(backend.parameters) == {
        name: tensor.shape for name, tensor in stage(1, llama_dir).tensors.items()
    }
    assert all(isinstance(shape, torch.Size) for shape in backend.parameters.values())


def test_a_context_above_the_models_is_cut_to_it(llama_dir):
    assert make_backend(llama_dir, max_context=10**6).limits.max_context == CONTEXT
    assert make_backend(llama_dir, max_context=None).limits.max_context == CONTEXT
    assert make_backend(llama_dir, max_context=40).limits.max_context == 40


def test_memory_that_holds_no_whole_sequence_is_refused(tmp_path):
    folder = save_model(tmp_path, "gpt2")
    needed = CONTEXT * 2 * 2 * 32 * 4  # keys and values, layers, hidden size, float32
    with pytest.raises(
        ConfigError, match=f"no sequence of {CONTEXT} tokens; give at least {needed}"
    ):
        make_backend(folder, kv_cache_bytes=1 << 16)
    make_backend(folder, kv_cache_bytes=needed)
    make_backend(folder, kv_cache_bytes=1 << 16, max_context=128)


async def test_stop_strings_need_a_tokenizer(backend):
    with pytest.raises(DataError, match="stop strings need a tokenizer"):
        await generate(backend, stop=("x",))


def test_a_directory_without_a_model_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        make_backend(tmp_path)


def test_kinds_of_attention_that_are_not_built_are_refused(tmp_path):
    config = Gemma2Config(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        attn_logit_softcapping=50.0,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="softcap: 50"):
        make_backend(tmp_path)


def test_the_backend_is_registered_under_its_name():
    assert BACKENDS.get("embedded_torch") is EmbeddedTorchBackend


async def test_an_unknown_parameter_is_the_caller_s_mistake_and_the_engine_goes_on(backend):
    with pytest.raises(DataError, match="no parameter 'x'"):
        await asyncio.to_thread(backend.read_parameter, "x")
    assert backend.failure is None
    assert len((await generate(backend)).output_tokens) == 20


def test_small_weights_are_freed_at_once_and_large_ones_with_pauses(monkeypatch):
    """The next version is staged once they are gone: a tiny model's must not be waited for."""
    pauses = []
    monkeypatch.setattr(swaps.time, "sleep", pauses.append)
    small = [torch.zeros(1000) for _ in range(200)]
    swaps.let_go(small)
    assert not small and pauses == []
    large = [torch.empty(swaps.FREE_BYTES, dtype=torch.uint8) for _ in range(3)]
    swaps.let_go(large)
    assert not large and pauses == [swaps.FREE_INTERVAL_S] * 3


async def test_a_request_that_cannot_be_sampled_ends_alone(backend):
    """Whatever passed the checks: the engine goes on with the others, who notice nothing."""
    alone = await generate(backend, "alone", max_new_tokens=12, seed=5)
    sound = request("sound", PROMPT, max_new_tokens=12, seed=5)
    broken = request("broken", PROMPT, max_new_tokens=12)
    broken = broken.model_copy(
        update={"gconfig": broken.gconfig.model_copy(update={"top_k": 2**70})}
    )
    calls = [asyncio.create_task(backend.generate(req)) for req in (broken, sound)]
    with pytest.raises(DataError, match="request broken cannot be sampled: "):
        await calls[0]
    assert (await calls[1]).output_tokens == alone.output_tokens
    assert backend.failure is None
    assert backend.load().running == 0


async def test_an_engine_that_can_sample_nothing_blames_no_request(backend, monkeypatch):
    """One request alone: it is not refused for good, and the server's supervisor hears of it."""

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(decoder.SamplingPlan, "sample", fail)
    with pytest.raises(BackendError, match="the engine died: RuntimeError: the device is gone"):
        await generate(backend)
    assert backend.failure is not None


@pytest.mark.parametrize("field", [{"top_k": 2**31}, {"stop_token_ids": (2**31,)}])
def test_numbers_that_no_vocabulary_has_are_refused_where_they_enter(field):
    with pytest.raises(ValidationError, match="less than 2147483648"):
        SamplingConfig(**field)


def masked(name: str = "r", **gconfig):
    asked = request(name, list(PROMPT), **({"max_new_tokens": 8, "seed": 3} | gconfig))
    return asked.model_copy(update={"sampling_mask": True})


async def test_a_mask_is_of_the_tokens_of_its_request_alone(backend):
    deltas = []
    cut, whole, greedy = await asyncio.wait_for(
        asyncio.gather(
            backend.generate(masked(top_k=3), deltas.append),
            backend.generate(masked("w")),
            backend.generate(masked("g", top_k=3, temperature=0.0)),
        ),
        DEADLINE_S,
    )
    assert cut.sampling_mask.problem(cut.output_tokens) is None
    assert cut.sampling_mask.counts.tolist() == [3] * 8
    assert [delta.output_logprobs[0] for delta in deltas] == cut.output_logprobs
    assert whole.sampling_mask is None
    assert greedy.sampling_mask is None
    plain = await generate(backend, max_new_tokens=8, seed=3, top_k=3)
    assert plain.output_tokens == cut.output_tokens
    assert plain.sampling_mask is None
    assert all(a < b for a, b in zip(plain.output_logprobs, cut.output_logprobs, strict=True))


async def test_a_mask_that_becomes_too_large_ends_its_request_alone(backend, monkeypatch):
    monkeypatch.setattr(decoder, "MAX_MASK_TOKENS", 20)
    calls = [backend.generate(masked(top_k=3)), backend.generate(masked("w", top_k=2))]
    refused, other = await asyncio.wait_for(
        asyncio.gather(*calls, return_exceptions=True), DEADLINE_S
    )
    assert isinstance(refused, DataError)
    assert "21 tokens were left to draw from over 7 positions" in refused.message
    assert len(other.output_tokens) == 8
    assert backend.load().running == 0


@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_loading_leaves_the_main_thread_no_helpers(llama_dir):
    """With more helpers than cores, OpenMP sends those of the decode loop to sleep after each product."""
    env = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", COUNTS_HELPERS, str(llama_dir)]
    printed = subprocess.check_output(command, env=env, timeout=DEADLINE_S, text=True)
    assert printed.strip() == "1", "it has none yet"
