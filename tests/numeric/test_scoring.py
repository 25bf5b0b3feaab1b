"""Logprobs of prompt tokens against full float64 forwards, however the prompt was computed."""

from __future__ import annotations

import asyncio

import pytest
import torch

from headway.contracts.errors import BackendError, DataError
from tests.numeric.backends import (
    errors,
    generate_all,
    prompt_of,
    request,
    serving,
    stage,
    stage_value,
)
from tests.numeric.models import VOCAB_SIZE, load_reference, reference_logits, save_model
from tests.waiting import until

CONTEXT = 700


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose context is longer than a chunk of scored tokens."""
    return save_model(tmp_path_factory.mktemp("long"), "llama", context=CONTEXT)


@pytest.fixture(scope="module")
def precise(folder):
    return load_reference(folder).double()


@torch.no_grad()
def table_of(model, prompt):
    """[T, V] row i: logprobs of the token at position i + 1."""
    return torch.log_softmax(reference_logits(model, prompt), dim=-1)


def check(model, asked, response):
    """Prompt logprobs and their alternatives from `logprob_start` on."""
    prompt, start = list(asked.input_ids), asked.logprob_start
    scores = response.prompt_logprobs
    assert len(scores) == len(prompt) - start
    if start == 0:
        assert scores[0] is None
    first = max(1, start)
    table = table_of(model, prompt)
    expected = [table[p - 1, prompt[p]] for p in range(first, len(prompt))]
    if expected:
        assert errors(scores[first - start :], torch.stack(expected)).max() < 1e-4
    if not asked.top_logprobs:
        assert response.prompt_top_logprobs is None
        return
    assert len(response.prompt_top_logprobs) == len(scores)
    for position in range(first, len(prompt)):
        values, tokens = table[position - 1].topk(min(asked.top_logprobs, VOCAB_SIZE))
        got = response.prompt_top_logprobs[position - start]
        assert [t for t, _ in got] == tokens.tolist()
        assert errors([x for _, x in got], values).max() < 1e-4


@pytest.mark.parametrize("max_prefill_tokens", [2048, 37])
@pytest.mark.parametrize("max_new_tokens", [0, 6])
async def test_scores_from_the_beginning_the_middle_and_the_end(
    folder, precise, max_prefill_tokens, max_new_tokens
):
    prompts = [prompt_of(n, n) for n in (1, 2, 17, 90, 600)]
    asked = [
        request(
            f"r{len(p)}-{start}",
            p,
            logprob_start=start,
            top_logprobs=3 * (len(p) % 2),
            max_new_tokens=max_new_tokens,
            temperature=0.6,  # of no effect on scores
            seed=start,
        )
        for p in prompts
        for start in sorted({0, 1, len(p) // 2, len(p) - 1, len(p)})
    ]
    options = {"max_sequences": 8, "max_prefill_tokens": max_prefill_tokens}
    async with serving(folder, **options) as backend:
        responses = await generate_all(backend, asked)
    for a, r in zip(asked, responses, strict=True):
        check(precise, a, r)
        assert len(r.output_tokens) == len(r.output_logprobs) == max_new_tokens
        assert r.stop_reason == "length"
        assert r.version_runs == ([(0, 0, max_new_tokens)] if max_new_tokens else [])


async def test_what_is_not_asked_for_is_not_reported(folder):
    async with serving(folder) as backend:
        response = await backend.generate(request("r", prompt_of(9, 1), top_logprobs=2))
    assert response.prompt_logprobs is None
    assert response.prompt_top_logprobs is None
    assert len(response.top_logprobs) == 20


async def test_scores_with_shared_prefixes_are_the_same(folder, precise):
    """Rows of earlier prompts are copied up to what has to be scored, and no further."""
    stem = prompt_of(300, 1)
    async with serving(folder) as backend:
        await backend.generate(request("first", stem, max_new_tokens=3))
        for start, cached in ((300, 300), (200, 199), (8, 0), (0, 0)):
            asked = request(
                f"from{start}",
                stem + prompt_of(20, 2 + start),
                logprob_start=start,
                max_new_tokens=0,
            )
            response = await backend.generate(asked)
            check(precise, asked, response)
            assert response.cached_tokens == max(0, min(cached, start - 1))


async def test_scoring_counts_no_generated_token_and_serves_as_a_prefix(folder):
    prompt = prompt_of(100, 5)
    async with serving(folder) as backend:
        await backend.generate(request("score", prompt, logprob_start=0, max_new_tokens=0))
        assert backend.load().generated_tokens == 0
        assert backend.load().prefill_tokens == 100
        response = await backend.generate(request("then", prompt, seed=1))
        assert response.cached_tokens == 99
        await backend.flush()
        alone = await backend.generate(request("alone", prompt, seed=1))
        assert (alone.output_tokens, alone.cached_tokens) == (response.output_tokens, 0)


async def test_a_whole_context_can_be_scored(folder, precise):
    asked = request("r", prompt_of(CONTEXT, 3), logprob_start=CONTEXT - 50, max_new_tokens=0)
    async with serving(folder) as backend:
        check(precise, asked, await backend.generate(asked))


async def test_a_start_behind_the_prompt_is_a_data_error(folder):
    async with serving(folder) as backend:
        with pytest.raises(DataError, match="logprob_start=6 is behind the prompt of 5 tokens"):
            await backend.generate(request("r", prompt_of(5, 1), logprob_start=6))


async def test_an_interrupted_score_says_which_positions_are_missing(folder, precise):
    """The engine stands still after its first chunk."""
    prompt = prompt_of(600, 1)
    asked = request("r", prompt, logprob_start=0, top_logprobs=2, max_new_tokens=0)
    async with serving(folder) as backend:
        chunks = []

        def stop_after_one_chunk(module, args, kwargs):
            chunks.append(kwargs["input_ids"].shape[1])
            backend._decode_loop.call(lambda: backend._decode_loop.pause("in_place"))

        hook = backend.model.module.register_forward_pre_hook(
            stop_after_one_chunk, with_kwargs=True
        )
        task = asyncio.create_task(backend.generate(asked))
        await until(lambda: backend.is_paused)
        await backend.abort("r")
        response = await task
        hook.remove()
    assert response.stop_reason == "interrupt"
    known = chunks[0] + 1
    assert len(response.prompt_logprobs) == len(response.prompt_top_logprobs) == 600
    assert None not in response.prompt_logprobs[1:known]
    assert set(response.prompt_logprobs[known:]) == {None}
    table = table_of(precise, prompt)
    expected = torch.stack([table[p - 1, prompt[p]] for p in range(1, known)])
    assert errors(response.prompt_logprobs[1:known], expected).max() < 1e-4


async def test_weights_that_are_not_finite_score_nothing(folder):
    async with serving(folder) as backend:
        await backend.swap(stage_value(1, folder, float("nan")))
        with pytest.raises(BackendError, match="request r: version 1 gave logits"):
            await backend.generate(
                request("r", prompt_of(30, 1), logprob_start=0, max_new_tokens=0)
            )
        await backend.swap(stage(2, folder))
        response = await backend.generate(
            request("r", prompt_of(30, 1), logprob_start=0, max_new_tokens=0)
        )
    assert all(score is not None and score < 0 for score in response.prompt_logprobs[1:])
