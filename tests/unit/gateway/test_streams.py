"""Streams through a fleet whose servers are scripted: they die, lie, are full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gateway.app.fleet import Fleet
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import (
    BackendError,
    LethalRequest,
    QueueFull,
    RequestTooLong,
    ServiceError,
)
from headway.contracts.http.paths import GENERATE_STREAM
from headway.contracts.types import LLMDelta, LLMRequest
from tests.unit.gateway.rollout_builders import make_response
from tests.unit.gateway.test_fleet import Server, opened, report

REQUEST = LLMRequest(rid="streamed", input_ids=(1, 2), gconfig=SamplingConfig(max_new_tokens=8))
EOS = 63


class StreamingServer(Server):
    """Streams its tokens one by one, and breaks off behind them unless it has a response."""

    def __init__(
        self, tokens: Sequence[int], *failures: ServiceError, breaks: bool = False
    ) -> None:
        super().__init__(*failures)
        self.tokens = list(tokens)
        self.breaks = breaks
        self.ending: bytes | None = None
        """What it says at the end instead of its response."""

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post(GENERATE_STREAM, self.stream)
        return app

    async def stream(self, request: web.Request) -> web.StreamResponse:
        req = LLMRequest.model_validate_json(await request.read())
        self.rids.append(req.rid)
        self.prompts.append(req.input_ids)
        if self.failures:
            error = self.failures.pop(0)
            return web.Response(status=error.http_status, text=error.to_body().model_dump_json())
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for token in self.tokens:
            delta = LLMDelta(output_tokens=[token], output_logprobs=[-0.5], version=0)
            await answer.write(event(b"delta", delta.model_dump_json().encode()))
        if self.breaks and request.transport is not None:
            await asyncio.sleep(0.05)  # the tokens are there before the end is
            request.transport.abort()
            return answer
        whole = make_response(req, self.tokens).model_dump_json().encode()
        await answer.write(self.ending or event(b"response", whole))
        return answer


def event(name: bytes, content: bytes) -> bytes:
    return b"event: " + name + b"\ndata: " + content + b"\n\n"


@asynccontextmanager
async def streaming(*servers: Server, **settings) -> AsyncIterator[tuple[Fleet, list[int]]]:
    """A fleet that prefers the first server, and the tokens that came."""
    async with opened(*servers, **settings) as fleet:
        yield fleet, []


async def ask(fleet: Fleet, came: list[int], req: LLMRequest = REQUEST):
    async with asyncio.timeout(20):
        return await fleet.agenerate(req, lambda delta: came.extend(delta.output_tokens))


async def test_tokens_come_one_by_one_and_then_the_response():
    async with streaming(StreamingServer([7, 8, 9])) as (fleet, came):
        response = await ask(fleet, came)
        assert came == response.output_tokens == [7, 8, 9]
        assert response.rid == REQUEST.rid


async def test_a_stream_goes_on_elsewhere_from_the_tokens_that_were_seen():
    dying, other = StreamingServer([7, 8], breaks=True), StreamingServer([9])
    async with streaming(dying, other) as (fleet, came):
        response = await ask(fleet, came)
        assert came == response.output_tokens == [7, 8, 9]
        assert response.version_runs == [(0, 0, 3)]
        assert len(response.output_logprobs) == 3
        assert other.prompts == [(1, 2, 7, 8)]


async def test_it_does_so_again_and_again_as_far_as_max_deaths():
    servers = [StreamingServer([7 + n], breaks=True) for n in range(3)]
    async with streaming(*servers, StreamingServer([20]), max_deaths=9) as (fleet, came):
        response = await ask(fleet, came)
        assert came == response.output_tokens == [7, 8, 9, 20]
    servers = [StreamingServer([7 + n], breaks=True) for n in range(2)]
    async with streaming(*servers, StreamingServer([20]), max_deaths=2) as (fleet, came):
        with pytest.raises(LethalRequest):
            await ask(fleet, came)


@pytest.mark.parametrize(
    ("tokens", "fields", "reason"),
    [
        ([7], {"gconfig": SamplingConfig(max_new_tokens=8, stop=("x",))}, "stop string"),
        ([7, EOS], {}, "ended it"),
        ([7, 9], {"gconfig": SamplingConfig(max_new_tokens=8, stop_token_ids=(9,))}, "ended it"),
        ([7], {"logprob_start": 0}, "what else was asked"),
        ([7], {"gconfig": SamplingConfig(max_new_tokens=8, presence_penalty=1.0)}, "start over"),
    ],
)
async def test_what_cannot_go_on_is_the_caller_s_to_send_again(tokens, fields, reason):
    dying, other = StreamingServer(tokens, breaks=True), StreamingServer([9])
    async with streaming(dying, other, ends=[EOS]) as (fleet, came):
        with pytest.raises(BackendError, match=reason):
            await ask(fleet, came, REQUEST.model_copy(update=fields))
        assert came == tokens
        assert other.rids == []


async def test_a_stream_with_all_its_tokens_needs_no_other_server():
    dying, other = StreamingServer([7, 8], breaks=True), StreamingServer([9])
    async with streaming(dying, other) as (fleet, came):
        limit = SamplingConfig(max_new_tokens=2)
        response = await ask(fleet, came, REQUEST.model_copy(update={"gconfig": limit}))
        assert came == response.output_tokens == [7, 8]
        assert (response.stop_reason, response.version_runs) == ("length", [(0, 0, 2)])
        assert other.rids == []


async def test_nothing_is_lost_with_a_server_that_dies_before_the_first_token():
    dying, other = StreamingServer([], breaks=True), StreamingServer([9])
    stop = SamplingConfig(max_new_tokens=8, stop=("x",))
    async with streaming(dying, other) as (fleet, came):
        response = await ask(fleet, came, REQUEST.model_copy(update={"gconfig": stop}))
        assert came == response.output_tokens == [9]
        assert other.prompts == [(1, 2)]


async def test_a_full_server_is_passed_over():
    full, free = StreamingServer([7], QueueFull("full")), StreamingServer([9])
    async with streaming(full, free) as (fleet, came):
        assert (await ask(fleet, came)).output_tokens == came == [9]


async def test_a_server_that_fails_on_the_way_says_why():
    failing, error = StreamingServer([7]), RequestTooLong("no memory left")
    failing.ending = event(b"error", error.to_body().model_dump_json().encode())
    async with streaming(failing) as (fleet, came):
        with pytest.raises(RequestTooLong, match="no memory left"):
            await ask(fleet, came)
        assert came == [7]


async def test_a_server_that_gives_up_on_the_way_is_followed_by_another():
    full, other = StreamingServer([7]), StreamingServer([9])
    full.ending = event(b"error", QueueFull("no memory").to_body().model_dump_json().encode())
    async with streaming(full, other) as (fleet, came):
        assert (await ask(fleet, came)).output_tokens == came == [7, 9]
        assert other.prompts == [(1, 2, 7)]


DELTA = LLMDelta(output_tokens=[7], output_logprobs=[-0.5], version=0)


@pytest.mark.parametrize(
    "lie",
    [
        event(b"delta", b'{"output_tokens": 7}'),
        event(b"delta", b"nonsense"),
        event(
            b"delta", DELTA.model_copy(update={"output_logprobs": []}).model_dump_json().encode()
        ),
        event(
            b"delta", DELTA.model_copy(update={"output_tokens": [-1]}).model_dump_json().encode()
        ),
        event(b"delta", DELTA.model_dump_json().encode()) * 9,
        event(b"response", make_response(REQUEST, [8]).model_dump_json().encode()),
        event(b"response", b"{}"),
        event(b"news", b"{}"),
        b"no event",
    ],
)
async def test_a_server_that_makes_up_a_stream_is_quarantined(lie: bytes):
    liar = StreamingServer([7])
    liar.ending = lie
    async with streaming(liar, max_failures=1, wait_s=0.2) as (fleet, came):
        with pytest.raises(BackendError):
            await ask(fleet, came)
        (status,) = fleet.statuses()
        assert status.state == "quarantined"


async def test_a_client_that_leaves_ends_its_stream():
    stuck = StreamingServer([7])
    stuck.ending = b": nothing more for now\n\n"

    async def hang(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(event(b"delta", DELTA.model_dump_json().encode()))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stuck.num_left += 1
            raise
        return answer

    stuck.stream = hang  # type: ignore[method-assign]
    async with streaming(stuck) as (fleet, came):
        task = asyncio.create_task(ask(fleet, came))
        while not came:  # noqa: ASYNC110 - nothing to be notified by
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(10):
            while not stuck.num_left:  # noqa: ASYNC110 - likewise
                await asyncio.sleep(0.001)
        fleet.report(report(0, stuck))
