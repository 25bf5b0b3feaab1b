"""What a server takes, how long it may last, and how it stops."""

from __future__ import annotations

import asyncio

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import Conflict, Draining, QueueFull, RequestTimeout
from headway.contracts.types import LLMRequest, LLMResponse
from inference_server.admission import RequestAdmission
from inference_server.backends.fake import FakeBackend
from inference_server.engine import LocalGenerator
from inference_server.version_gate import VersionGate
from weight_sync.receiver import make_receiver

DEADLINE_S = 10.0
LONG = 10_000


def make_generator(admission: RequestAdmission | None = None) -> LocalGenerator:
    backend = FakeBackend(FakeBackendConfig(token_latency_s=0.001), ModelConfig(path="unused"), 0)
    return LocalGenerator(
        backend, VersionGate(backend, make_receiver(ReceiverConfig())), "local", None, admission
    )


def request(rid: str, max_new_tokens: int = LONG) -> LLMRequest:
    gconfig = SamplingConfig(max_new_tokens=max_new_tokens)
    return LLMRequest(rid=rid, input_ids=(1, 2), gconfig=gconfig)


async def started(
    generator: LocalGenerator, rid: str, max_new_tokens: int = LONG
) -> asyncio.Task[LLMResponse]:
    """A request that has sampled its first token."""
    sampling = asyncio.Event()
    work = generator.agenerate(request(rid, max_new_tokens), lambda delta: sampling.set())
    task = asyncio.create_task(work)
    await asyncio.wait_for(sampling.wait(), DEADLINE_S)
    return task


async def ended(task: asyncio.Task[LLMResponse]) -> LLMResponse:
    return await asyncio.wait_for(task, DEADLINE_S)


async def test_more_than_max_in_flight_is_refused_until_one_ends():
    generator = make_generator(RequestAdmission(max_in_flight=2))
    first, second = await started(generator, "a"), await started(generator, "b")
    with pytest.raises(QueueFull, match="max_in_flight=2") as full:
        await generator.agenerate(request("c", 1))
    assert full.value.retryable
    await generator.backend.abort("a")
    await ended(first)
    assert (await generator.agenerate(request("c", 1))).stop_reason == "length"
    await generator.backend.abort("b")
    await ended(second)
    assert generator.admission.in_flight == 0


async def test_an_id_in_flight_is_a_conflict_and_free_again_afterwards():
    generator = make_generator()
    first = await started(generator, "same")
    with pytest.raises(Conflict, match="'same' is in flight"):
        await generator.agenerate(request("same", 1))
    await generator.backend.abort("same")
    assert (await ended(first)).stop_reason == "interrupt"
    await generator.agenerate(request("same", 1))


async def test_a_request_that_takes_too_long_is_cancelled():
    generator = make_generator(RequestAdmission(timeout_s=0.05))
    with pytest.raises(RequestTimeout, match=r"longer than request_timeout_s=0\.05"):
        await generator.agenerate(request("slow"))
    assert generator.backend.load().running == 0
    assert (await generator.agenerate(request("quick", 1))).stop_reason == "length"


async def test_a_cancelled_caller_gives_its_place_back():
    generator = make_generator(RequestAdmission(max_in_flight=1))
    first = await started(generator, "a")
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await generator.agenerate(request("a", 1))
    assert generator.backend.load().running == 0


async def test_a_drain_lets_end_what_ends_in_time():
    generator = make_generator()
    running = await started(generator, "a", 30)
    await asyncio.wait_for(generator.drain(DEADLINE_S), DEADLINE_S)
    response = await ended(running)
    assert (response.stop_reason, len(response.output_tokens)) == ("length", 30)
    with pytest.raises(Draining, match="draining"):
        await generator.agenerate(request("b", 1))
    report = generator.report("s", "http://h:1")
    assert (report.draining, report.max_context_tokens) == (
        True,
        generator.backend.limits.max_context,
    )
    assert [status.state for status in generator.statuses()] == ["draining"]


async def test_a_drain_ends_the_rest_with_the_tokens_so_far():
    generator = make_generator()
    running = await started(generator, "a")
    await asyncio.wait_for(generator.drain(0.0), DEADLINE_S)
    response = await ended(running)
    assert response.stop_reason == "interrupt"
    assert 0 < len(response.output_tokens) < LONG


async def test_a_drain_refuses_what_waits_behind_a_pause():
    generator = make_generator()
    await generator.backend.pause("in_place")
    waiting = asyncio.create_task(generator.agenerate(request("a", 1)))
    await asyncio.sleep(0)
    await asyncio.wait_for(generator.drain(0.0), DEADLINE_S)
    with pytest.raises(Draining, match="'a' was ended by the shutdown"):
        await ended(waiting)
    assert generator.admission.in_flight == 0


async def test_an_error_of_the_work_is_not_taken_for_a_timeout():
    admission = RequestAdmission(timeout_s=DEADLINE_S)
    with pytest.raises(TimeoutError, match="of the work"):
        async with admission.admit("a"):
            raise TimeoutError("of the work")
    assert admission.in_flight == 0
