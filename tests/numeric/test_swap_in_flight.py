"""Weights change under running requests: each token's version and logprob tell the truth."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import DynamicCache

from headway.contracts.errors import BackendError
from tests.numeric.backends import DEADLINE_S, prompt_of, request, serving, stage, stage_value
from tests.numeric.models import (
    CONTEXT,
    extend_cache,
    load_reference,
    reference_logprobs,
    save_model,
)
from tests.waiting import until

NUM_TOKENS = 200


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """Directories of versions 0, 1 and 2 of one architecture."""
    root = tmp_path_factory.mktemp("policies")
    return [save_model(root / f"v{seed}", "llama", seed=seed) for seed in range(3)]


@torch.no_grad()
def replay(models, prompt, response):
    """Logprobs of a response whose tokens were sampled by several models over one kept cache."""
    cache = DynamicCache()
    fed, logprobs = prompt, []
    for token, version in zip(response.output_tokens, response.output_versions, strict=True):
        logits = extend_cache(models[version], cache, fed)
        logprobs.append(torch.log_softmax(logits[-1].double(), dim=-1)[token])
        fed = [token]
    return torch.stack(logprobs)


async def swap_while_generating(policies, requests):
    updates = [stage(version, policies[version]) for version in (1, 2)]
    async with serving(policies[0], max_sequences=4) as backend:
        tasks = [asyncio.create_task(backend.generate(r)) for r in requests]
        in_flight = []
        for update in updates:
            seen = backend.load().generated_tokens
            await until(lambda seen=seen: backend.load().generated_tokens >= seen + 20)
            in_flight.append(await backend.swap(update))
            assert backend.version == update.version
        responses = await asyncio.wait_for(asyncio.gather(*tasks), DEADLINE_S)
    return responses, in_flight


@pytest.fixture(scope="module")
def mixed(policies):
    """Long requests, more than slots, with two swaps while they run."""
    lengths = [5, 33, 1, 12, 20, 9]
    requests = [
        request(f"r{i}", prompt_of(n, i), seed=i, max_new_tokens=NUM_TOKENS)
        for i, n in enumerate(lengths)
    ]
    responses, in_flight = asyncio.run(swap_while_generating(policies, requests))
    return requests, responses, in_flight


def test_runs_cover_every_token_and_versions_never_fall(mixed):
    _, responses, in_flight = mixed
    assert in_flight == [4, 4]
    for response in responses:
        ends = [0, *(end for _, _, end in response.version_runs)]
        starts = [start for _, start, _ in response.version_runs]
        versions = [version for version, _, _ in response.version_runs]
        assert starts == ends[:-1]
        assert ends[-1] == len(response.output_tokens) == NUM_TOKENS
        assert versions == sorted(set(versions))
    assert sum(len(r.version_runs) == 3 for r in responses) == 4
    assert [r.version_runs for r in responses[4:]] == [[(2, 0, NUM_TOKENS)]] * 2


def test_logprobs_are_those_of_the_version_over_the_kept_cache(mixed, policies):
    requests, responses, _ = mixed
    models = [load_reference(folder) for folder in policies]
    for asked, response in zip(requests, responses, strict=True):
        expected = replay(models, list(asked.input_ids), response)
        got = torch.tensor(response.output_logprobs, dtype=torch.float64)
        assert (got - expected).abs().max() < 1e-4


def test_tokens_before_the_first_swap_have_the_old_weights_logprobs(mixed, policies):
    requests, responses, _ = mixed
    old = load_reference(policies[0])
    for asked, response in zip(requests[:4], responses[:4], strict=True):
        version, start, end = response.version_runs[0]
        assert (version, start) == (0, 0)
        expected = reference_logprobs(old, list(asked.input_ids), response.output_tokens)
        errors = (torch.tensor(response.output_logprobs, dtype=torch.float64) - expected).abs()
        assert errors[:end].max() < 1e-4
        assert errors[end:].max() > 0.1  # the new weights really are others


async def test_weights_that_are_not_finite_fail_the_request_and_good_ones_bring_the_server_back(
    policies,
):
    async with serving(policies[0], max_sequences=3) as backend:
        running = [
            asyncio.create_task(
                backend.generate(request(f"long{i}", prompt_of(8, i), max_new_tokens=CONTEXT - 8))
            )
            for i in range(3)
        ]
        await until(lambda: backend.load().generated_tokens >= 30)
        await backend.swap(stage_value(1, policies[0], float("nan")))
        for index, outcome in enumerate(await asyncio.gather(*running, return_exceptions=True)):
            assert isinstance(outcome, BackendError)
            assert f"long{index}" in outcome.message
            assert "version 1" in outcome.message
        with pytest.raises(BackendError, match="request broken: version 1"):
            await backend.generate(request("broken", prompt_of(60, 9)))
        await backend.swap(stage(2, policies[2]))
        model = load_reference(policies[2])
        prompts = [prompt_of(n, n) for n in (1, 30, 7, 50)]
        asked = [request(f"r{i}", p, max_new_tokens=60) for i, p in enumerate(prompts)]
        responses = await asyncio.gather(*(backend.generate(r) for r in asked))
    for prompt, response in zip(prompts, responses, strict=True):
        expected = reference_logprobs(model, prompt, response.output_tokens)
        got = torch.tensor(response.output_logprobs, dtype=torch.float64)
        assert (got - expected).abs().max() < 1e-4
        assert response.version_runs == [(2, 0, 60)]
