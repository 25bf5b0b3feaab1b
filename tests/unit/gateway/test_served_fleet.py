"""The fleet as one model: aborts, pauses and interruptions; servers scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from gateway.app import served_fleet
from gateway.app.fleet import Fleet
from gateway.app.served_fleet import ServedFleet
from gateway.fleet.pause import FleetPause
from gateway.fleet.shared_aborts import MAX_KEPT, SharedAborts
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.engines import OnDelta
from headway.contracts.errors import BackendError
from headway.contracts.http import paths
from headway.contracts.http.generation import GenerationPauseRequest
from headway.contracts.types import LLMDelta, LLMRequest, LLMResponse
from headway.dialects.error_shapes import InvalidField
from headway.text.tokenizer import TextTokenizer
from tests.unit.gateway.shared_notes import SharedNotes
from tests.unit.gateway.test_fleet import Server, opened, report
from tests.waiting import until

REQUEST = LLMRequest(rid="r", input_ids=(1, 2), gconfig=SamplingConfig(max_new_tokens=8))


class PausingServer(Server):
    """Notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.is_deaf = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    def app(self) -> web.Application:
        app = super().app()
        app.router.add_post(paths.GENERATION_PAUSE, self.pause)
        app.router.add_post(paths.GENERATION_RESUME, self.resume)
        return app

    async def pause(self, request: web.Request) -> web.Response:
        body = GenerationPauseRequest.model_validate_json(await request.read())
        await self.may_answer.wait()
        return self._noted(body.mode)

    async def resume(self, request: web.Request) -> web.Response:
        return self._noted("resume")

    def _noted(self, order: str) -> web.Response:
        if self.is_deaf:
            return web.Response(status=500)
        self.told.append(order)
        return web.Response(status=204)


@asynccontextmanager
async def served(tokenizer_dir: Path, *servers: Server) -> AsyncIterator[tuple[ServedFleet, Fleet]]:
    async with opened(*servers) as fleet:
        tokenizer = TextTokenizer(str(tokenizer_dir))
        yield ServedFleet(GatewayConfig(tokenizer=str(tokenizer_dir)), fleet, tokenizer), fleet


async def test_an_interruption_by_a_server_is_no_end(tokenizer_dir: Path):
    only = Server()
    only.is_stuck = True
    async with served(tokenizer_dir, only) as (model, _):
        work = asyncio.create_task(model.agenerate(REQUEST))
        await until(lambda: bool(only.rids))
        only.is_stuck = False
        only._abort.set()
        response = await work
        assert (response.output_tokens, response.stop_reason) == ([5, 6, 7], "stop")
        assert only.prompts == [(1, 2), (1, 2, 5, 6)]


async def test_an_abort_by_the_client_is_one(tokenizer_dir: Path):
    only = Server()
    only.is_stuck = True
    async with served(tokenizer_dir, only) as (model, _):
        work = asyncio.create_task(model.agenerate(REQUEST))
        await until(lambda: bool(only.rids))
        with pytest.raises(InvalidField, match="in use"):
            await model.agenerate(REQUEST)
        await model.abort("another")
        await model.abort(REQUEST.rid)
        response = await work
        assert (response.output_tokens, response.stop_reason) == ([5, 6], "interrupt")
        assert len(only.rids) == 1


async def test_a_request_that_waits_for_a_server_is_aborted_at_once(tokenizer_dir: Path):
    async with served(tokenizer_dir) as (model, _):
        work = asyncio.create_task(model.agenerate(REQUEST))
        await asyncio.sleep(0.05)
        assert not work.done()
        await model.abort(None)
        response = await work
        assert (response.output_tokens, response.stop_reason) == ([], "interrupt")


async def test_a_server_that_ignores_an_abort_takes_no_tokens_with_it(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(served_fleet, "ABORT_GRACE_S", 0.01)
    async with served(tokenizer_dir, Server()) as (model, fleet):

        async def deaf(req: LLMRequest, on_delta: OnDelta | None = None) -> LLMResponse:
            assert on_delta is not None
            on_delta(LLMDelta(output_tokens=[5], output_logprobs=[-0.5], version=3))
            on_delta(LLMDelta(output_tokens=[6], output_logprobs=[-0.25], version=3))
            return await asyncio.get_running_loop().create_future()

        async def told(rid: str) -> bool:
            return True

        fleet.agenerate, fleet.abort = deaf, told  # type: ignore[method-assign]
        seen: list[LLMDelta] = []
        work = asyncio.create_task(model.agenerate(REQUEST, seen.append))
        await until(lambda: len(seen) == 2)
        await model.abort(REQUEST.rid)
        response = await work
        assert (response.output_tokens, response.stop_reason) == ([5, 6], "interrupt")
        assert response.version_runs == [(3, 0, 2)]


async def test_a_stream_with_stop_strings_is_not_joined(tokenizer_dir: Path):
    only = Server()
    stop = REQUEST.model_copy(update={"gconfig": SamplingConfig(max_new_tokens=8, stop=("x",))})
    async with served(tokenizer_dir, only) as (model, fleet):
        interrupted = (await model.agenerate(REQUEST)).model_copy(
            update={"stop_reason": "interrupt"}
        )

        async def answer(req, on_delta=None):
            return interrupted

        fleet.agenerate = answer  # type: ignore[method-assign]
        with pytest.raises(BackendError, match="stop string"):
            await model.agenerate(stop, lambda delta: None)


async def test_a_pause_holds_for_servers_that_join_fail_and_come_back(tokenizer_dir: Path):
    first, second, third = PausingServer(), PausingServer(), PausingServer()
    second.is_deaf = True
    async with served(tokenizer_dir, first, second) as (model, fleet):
        fleet.report(report(0, first, uptime_s=5.0))
        with pytest.raises(BackendError, match="not every server was told to pause: "):
            await model.pause("in_place")
        assert model.is_paused and not model.is_ready
        assert (first.told, second.told) == (["in_place"], [])
        second.is_deaf = False
        fleet.report(report(1, second))  # it is told again
        await until(lambda: second.told == ["in_place"])
        fleet.report(report(0, first, uptime_s=1.0))  # it was started again
        await until(lambda: first.told == ["in_place"] * 2)
        third.url = first.url.rpartition(":")[0] + ":1"  # it cannot be reached
        fleet.report(report(2, third))
        await asyncio.sleep(0.05)
        await model.resume()
        assert not model.is_paused and model.is_ready
        assert first.told[-1] == second.told[-1] == "resume"
        fleet.report(report(0, first, uptime_s=2.0))
        fleet.report(report(1, second))
        await asyncio.sleep(0.05)
        assert (len(first.told), len(second.told)) == (3, 2)
        await model.resume()
        assert (len(first.told), len(second.told)) == (3, 2), "nothing to resume"


async def test_a_server_that_restarts_while_others_are_told_is_told_again(tokenizer_dir: Path):
    first, second = PausingServer(), PausingServer()
    second.may_answer.clear()
    async with served(tokenizer_dir, first, second) as (model, fleet):
        fleet.report(report(0, first, uptime_s=5.0))
        pausing = asyncio.create_task(model.pause("in_place"))
        await until(lambda: first.told == ["in_place"])
        fleet.report(report(0, first, uptime_s=1.0))
        second.may_answer.set()
        await pausing
        await until(lambda: first.told == ["in_place"] * 2)
        await model.resume()


async def test_a_pause_is_that_of_every_gateway_and_outlives_them():
    notes, server = SharedNotes(), PausingServer()
    async with opened(server) as fleet, opened(server) as other:
        first, second = FleetPause(fleet.members, notes), FleetPause(other.members, notes)
        await first.begin("retract")
        await second.follow()
        assert second.is_on
        await until(lambda: server.told == ["retract"] * 2)  # once by each
        await second.end()
        await first.follow()
        assert not first.is_on
        await until(lambda: server.told[2:] == ["resume"] * 2)
        await first.begin("in_place")
        third = FleetPause(other.members, notes)  # of a process that starts now
        await third.follow()
        assert third.is_on


async def test_an_abort_is_heard_by_the_gateway_that_has_the_request():
    notes, ended = SharedNotes(), []
    one, other = SharedAborts(notes), SharedAborts(notes)
    other.end = ended.append
    await one.ask("of a former time")
    await other.follow()
    assert ended == [], "what was asked before it came is not its concern"
    await asyncio.gather(one.ask("a"), one.ask("b"))
    await one.ask(None)
    await other.follow()
    await other.follow()
    assert ended == ["a", "b", None]
    for number in range(MAX_KEPT + 5):
        await one.ask(str(number))
    ended.clear()
    await other.follow()
    assert ended == [str(number) for number in range(5, MAX_KEPT + 5)]
    notes.is_shared = False
    await one.ask("nobody else is there")
    await other.follow()
    assert len(ended) == MAX_KEPT
