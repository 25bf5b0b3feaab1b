"""The fake keeps a real backend's promises."""

from __future__ import annotations

import asyncio

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.errors import BackendError, DataError, RequestTooLong
from headway.contracts.types import LLMRequest
from inference_server.backends.base import make_backend
from weight_sync.channel import StagedWeights


def fake(**config):
    return make_backend(FakeBackendConfig(**config), ModelConfig(path="unused"), 0)


def request(prompt=(1, 2), **gconfig):
    options = {"max_new_tokens": 8} | gconfig
    return LLMRequest(rid="r", input_ids=prompt, gconfig=SamplingConfig(**options))


async def test_tokens_follow_from_prompt_seed_and_version():
    backend = fake()
    one = await backend.generate(request(seed=1))
    assert (await backend.generate(request(seed=1))).output_tokens == one.output_tokens
    assert (await backend.generate(request(seed=2))).output_tokens != one.output_tokens
    assert (await backend.generate(request((1, 3), seed=1))).output_tokens != one.output_tokens
    await backend.swap(StagedWeights(1, "0" * 64, {}))
    two = await backend.generate(request(seed=1))
    assert two.output_tokens != one.output_tokens
    assert two.version_runs == [(1, 0, 8)]


async def test_lengths_limits_and_vocabulary():
    backend = fake(vocab_size=10, max_context=12)
    response = await backend.generate(request())
    assert len(response.output_tokens) == len(response.output_logprobs) == 8
    assert all(0 <= token < 10 for token in response.output_tokens)
    with pytest.raises(RequestTooLong, match="2 prompt"):
        await backend.generate(request(max_new_tokens=11))
    with pytest.raises(DataError, match="token id 10"):
        await backend.generate(request((10,)))


async def test_close_fails_what_runs_and_cancelling_frees_the_slot():
    backend = fake(token_latency_s=0.001)
    doomed = asyncio.create_task(backend.generate(request(max_new_tokens=10_000)))
    running = asyncio.create_task(backend.generate(request(max_new_tokens=10_000)))
    await asyncio.sleep(0)
    assert backend.load().running == 2
    doomed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed
    assert backend.load().running == 1
    backend.close()
    with pytest.raises(BackendError, match="closed"):
        await running
    assert backend.load().running == 0
