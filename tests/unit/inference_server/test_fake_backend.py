"""The fake keeps a real backend's promises."""

from __future__ import annotations

import asyncio

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.errors import BackendError, DataError, RequestTooLong
from headway.contracts.types import LLMDelta, LLMRequest
from inference_server.backends.base import GenerationBackend, make_backend
from weight_sync.channel import StagedWeights

DEADLINE_S = 10.0
LONG = 10_000


def fake(**config) -> GenerationBackend:
    return make_backend(FakeBackendConfig(**config), ModelConfig(path="unused"), 0, None)


def slow() -> GenerationBackend:
    return fake(token_latency_s=0.001)


def request(prompt=(1, 2), rid="r", **gconfig):
    options = {"max_new_tokens": 8} | gconfig
    return LLMRequest(rid=rid, input_ids=prompt, gconfig=SamplingConfig(**options))


class Started:
    """A request that runs on, and what came of it so far."""

    def __init__(self, backend: GenerationBackend, **fields) -> None:
        self.deltas: list[LLMDelta] = []
        self._came = asyncio.Event()
        req = request(**({"max_new_tokens": LONG} | fields))
        self.task = asyncio.create_task(backend.generate(req, self._take))

    def _take(self, delta: LLMDelta) -> None:
        self.deltas.append(delta)
        self._came.set()

    async def token(self) -> None:
        """Wait for one more token."""
        self._came.clear()
        await asyncio.wait_for(self._came.wait(), DEADLINE_S)

    async def response(self):
        return await asyncio.wait_for(self.task, DEADLINE_S)


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
    with pytest.raises(DataError, match="input_ids holds 10, the vocabulary has 10"):
        await backend.generate(request((10,)))


async def test_what_it_has_no_text_or_distribution_for_is_refused():
    with pytest.raises(DataError, match="no text and no distribution"):
        await fake().generate(request(stop=("x",)))


async def test_close_fails_what_runs_and_cancelling_frees_the_slot():
    backend = slow()
    doomed, running = Started(backend), Started(backend)
    await running.token()
    assert backend.load().running == 2
    doomed.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await doomed.task
    assert backend.load().running == 1
    await backend.aclose()
    with pytest.raises(BackendError, match="closed"):
        await running.response()
    assert backend.load().running == 0


async def test_deltas_add_up_to_the_response():
    deltas = []
    response = await fake().generate(request(), deltas.append)
    assert [token for delta in deltas for token in delta.output_tokens] == response.output_tokens
    assert {delta.version for delta in deltas} == {0}


async def test_abort_ends_one_request_or_all_with_the_tokens_so_far():
    backend = slow()
    one, other = Started(backend, rid="one"), Started(backend, rid="other")
    await one.token()
    await backend.abort("nobody")
    await backend.abort("one")
    response = await one.response()
    assert response.stop_reason == "interrupt"
    assert 0 < len(response.output_tokens) < LONG
    await other.token()
    await backend.abort(None)
    assert (await other.response()).stop_reason == "interrupt"


async def test_a_paused_backend_decodes_nothing_and_holds_new_requests():
    backend = slow()
    running = Started(backend)
    await running.token()
    await backend.pause("in_place")
    assert backend.is_paused
    waiting = asyncio.create_task(backend.generate(request(rid="later")))
    seen = backend.load().generated_tokens
    assert not (await asyncio.wait((waiting, running.task), timeout=0.05))[0]
    assert backend.load().generated_tokens <= seen + 1
    await backend.resume()
    assert (await asyncio.wait_for(waiting, DEADLINE_S)).stop_reason == "length"
    await backend.abort(None)
    response = await running.response()
    assert response.num_recomputes == 0


async def test_a_pause_by_abort_ends_what_runs_and_a_retraction_recomputes_it():
    backend = slow()
    ended = Started(backend)
    await ended.token()
    await backend.pause("abort")
    assert (await ended.response()).stop_reason == "interrupt"
    await backend.resume()
    retracted = Started(backend, max_new_tokens=20)
    await retracted.token()
    await backend.pause("retract")
    await backend.resume()
    assert (await retracted.response()).num_recomputes == 1


@pytest.mark.parametrize(
    ("policy", "stop_reason", "versions", "recomputes"),
    [
        ("keep", "length", {0, 1}, 0),
        ("recompute", "length", {0, 1}, 1),
        ("abort", "interrupt", {0}, 0),
        ("drain", "length", {0}, 0),
    ],
)
async def test_a_swap_does_to_running_sequences_what_its_policy_says(
    policy, stop_reason, versions, recomputes
):
    backend = slow()
    running = Started(backend, max_new_tokens=40)
    await running.token()
    assert await backend.swap(StagedWeights(1, "0" * 64, {}), policy) == 1
    assert backend.version == 1
    response = await running.response()
    assert response.stop_reason == stop_reason
    assert set(response.output_versions) == versions
    assert response.num_recomputes == recomputes


async def test_flush_wants_an_idle_backend():
    backend = slow()
    assert await backend.flush()
    running = Started(backend)
    await running.token()
    assert not await backend.flush()
    await backend.abort(None)
    await running.response()
