"""One seed, one response: whatever else the engine does, and however it computes the prompt."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from tests.numeric.backends import Heard, errors, generate_all, prompt_of, request, serving
from tests.numeric.models import load_reference, reference_logprobs, save_model

CONTEXT = 640
TOKEN_BYTES = 2 * 2 * 2 * 8 * 4
"""Keys and values, layers, key heads, head size, float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("long"), "llama", context=CONTEXT)


def crowd():
    """Prompts of many lengths, some of them alike at the beginning, some the same."""
    stem = prompt_of(150, 77)
    prompts = [
        prompt_of(5, 1),
        stem,
        stem + prompt_of(40, 2),
        stem[:90] + prompt_of(30, 3),
        prompt_of(300, 4),
        stem,
        prompt_of(1, 5),
        prompt_of(64, 6),
    ]
    options = [{}, {"top_p": 0.8}, {"frequency_penalty": 0.5}, {"temperature": 0.5, "top_k": 9}]
    return [
        request(f"r{i}", p, seed=100 + i, max_new_tokens=120 + 10 * i, **options[i % 4])
        for i, p in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def alone(folder):
    """Each request by itself on a fresh cache."""

    async def run():
        responses = []
        async with serving(folder) as backend:
            for asked in crowd():
                responses.append(await backend.generate(asked))
                assert await backend.flush()
        return responses

    return asyncio.run(run())


def outputs(responses):
    return [r.output_tokens for r in responses]


def assert_same(responses, alone):
    assert outputs(responses) == outputs(alone)
    for got, expected in zip(responses, alone, strict=True):
        assert errors(got.output_logprobs, torch.tensor(expected.output_logprobs)).max() < 1e-4


def test_alone_they_have_the_logprobs_of_full_forwards(folder, alone):
    model = load_reference(folder)
    for asked, response in zip(crowd(), alone, strict=True):
        if asked.gconfig.frequency_penalty == 0.0:
            expected = reference_logprobs(
                model, list(asked.input_ids), response.output_tokens, asked.gconfig.temperature
            )
            assert errors(response.output_logprobs, expected).max() < 1e-4
    assert len({tuple(r.output_tokens[:10]) for r in alone}) == len(alone)


async def test_in_a_crowd(folder, alone):
    async with serving(folder, max_sequences=8) as backend:
        assert_same(await generate_all(backend, crowd()), alone)


async def test_with_prompts_in_chunks(folder, alone):
    async with serving(folder, max_sequences=8, max_prefill_tokens=19) as backend:
        assert_same(await generate_all(backend, crowd()), alone)


async def test_with_shared_prefixes(folder, alone):
    async with serving(folder, max_sequences=8) as backend:
        await generate_all(backend, crowd())
        again = await generate_all(backend, crowd())
    assert_same(again, alone)
    assert [r.cached_tokens for r in again] == [0, 149, 189, 119, 299, 149, 0, 63]


async def test_with_siblings_that_arrive_one_after_another(folder, alone):
    """The prompt is computed once while the earlier ones run."""
    prompt = prompt_of(512, 9)
    asked = [request(f"s{i}", prompt, seed=i, max_new_tokens=100) for i in range(8)]
    async with serving(folder, max_sequences=8, max_prefill_tokens=100) as backend:
        tasks = []
        for a in asked:
            heard = Heard()
            tasks.append(asyncio.create_task(backend.generate(a, heard)))
            await heard.until(1)
        together = await asyncio.gather(*tasks)
        assert backend.load().prefill_tokens <= 1.05 * 512
        await backend.flush()
        single = await backend.generate(asked[3])
    assert single.output_tokens == together[3].output_tokens
    assert len({tuple(r.output_tokens) for r in together}) == 8


@pytest.mark.parametrize("room", [CONTEXT, 900, 1500])
async def test_after_preemption(folder, alone, room):
    options = {"max_sequences": 8, "kv_cache_bytes": room * TOKEN_BYTES, "max_prefill_tokens": 100}
    async with serving(folder, **options) as backend:
        assert backend.load().kv_capacity_tokens == room
        responses = await generate_all(backend, crowd())
    assert_same(responses, alone)
    assert sum(r.num_recomputes for r in responses) > 0


async def test_ample_memory_recomputes_nothing(alone):
    assert [r.num_recomputes for r in alone] == [0] * len(alone)


async def test_after_a_pause_of_each_kind_that_ends_nobody(folder, alone):
    async with serving(folder, max_sequences=8) as backend:
        tasks, heard = [], Heard()
        for asked in crowd():
            tasks.append(asyncio.create_task(backend.generate(asked, heard)))
        for seen, mode in ((40, "in_place"), (200, "retract")):
            await heard.until(seen)
            await backend.pause(mode)
            before = backend.load().generated_tokens
            assert await backend.flush() == (mode == "retract")
            assert backend.load().generated_tokens == before
            await backend.resume()
        responses = await asyncio.gather(*tasks)
    assert_same(responses, alone)
    assert all(r.num_recomputes <= 1 for r in responses)
    assert any(r.num_recomputes for r in responses)


async def test_long_prompts_do_not_hold_up_running_sequences(folder):
    """Every step computes at most the allowed prompt tokens, and one token of each running request."""
    steps = []
    async with serving(folder, max_sequences=6, max_prefill_tokens=64) as backend:

        def count(module, args, kwargs):
            steps.append((kwargs["input_ids"].shape[1], backend.load().generated_tokens))

        backend.model.module.register_forward_pre_hook(count, with_kwargs=True)
        running = [request(f"r{i}", prompt_of(3, i), max_new_tokens=150) for i in range(4)]
        heard = Heard()
        tasks = [asyncio.create_task(backend.generate(r, heard)) for r in running]
        await heard.until(12)
        begun = len(steps)
        await backend.generate(request("long", prompt_of(600, 9), max_new_tokens=1))
        ended = len(steps)
        await asyncio.gather(*tasks)
    assert max(size for size, _ in steps) <= 64 + 4
    assert ended - begun >= 600 // 64
    chunks = [index for index, (size, _) in enumerate(steps) if size >= 64]
    assert len(chunks) >= 9
    for first, second in pairwise(chunks):
        assert steps[second][1] >= steps[first][1] + 4  # the four went on in between
