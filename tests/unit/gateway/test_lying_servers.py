"""Servers that answer what cannot be: charged to them, while their requests are answered by others."""

from __future__ import annotations

import asyncio
import time

import pytest
from aiohttp import web

from gateway.fleet import dispatch
from gateway.ledger.sqlite import SqliteLedger
from gateway.versions.publication_state import PublicationState
from headway.contracts.errors import BackendError, DataError, QueueFull
from headway.contracts.http.weights import WeightRecord
from headway.contracts.types import LLMRequest
from headway.text.vocabulary import Vocabulary
from tests.unit.gateway.rollout_builders import make_response
from tests.unit.gateway.test_fleet import REQUEST, Server, opened, report, states
from tests.waiting import until

VOCAB_SIZE = 100


class Liar(Server):
    """Answers at once, with what it was told to."""

    def __init__(self, tokens: list[int], version: int = 0, **changes: object) -> None:
        super().__init__()
        self._tokens, self.version, self._changes = tokens, version, changes

    async def answer(self, req: LLMRequest) -> web.Response:
        response = make_response(req, self._tokens, self.version).model_dump()
        return web.json_response(response | self._changes)


LIARS = {
    "a token that the model has not": Liar([2**30]),
    "a version that was never published": Liar([7], version=999),
    "a version before all others": Liar([7], version=-7),
    "more tokens than were asked for": Liar([7] * 200_000),
    "no token": Liar([], version_runs=[]),
    "a logprob above zero": Liar([7], output_logprobs=[55.0]),
    "a logprob that is no number": Liar([7], output_logprobs=[None]),
    "versions of more tokens": Liar([7], version_runs=[[0, 0, 20_000_000]]),
    "another request's answer": Liar([7], rid="another"),
    "no generation": Liar([7], stop_reason="unheard-of"),
}


@pytest.mark.parametrize("liar", LIARS.values(), ids=LIARS)
async def test_a_lie_is_charged_to_the_server_and_another_one_answers(liar: Liar):
    honest = Server()
    async with opened(
        liar, honest, vocabulary=Vocabulary(model_size=VOCAB_SIZE), quarantine_s=60.0
    ) as fleet:
        for _ in range(4):
            assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert states(fleet) == {"s0": "quarantined", "s1": "ready"}
        reasons = [status.reason for status in fleet.statuses()]
        assert liar.url in reasons[0] and not reasons[1]
        assert len(liar.rids) == 1


async def test_a_version_that_another_gateway_has_just_published_is_no_lie(caplog):
    ledger = SqliteLedger(":memory:")
    await ledger.open("shared", 30.0)
    here, there = PublicationState(ledger), PublicationState(ledger)
    server = Liar([7], version=3)
    async with opened(server, state=here, wait_s=0.1) as fleet:
        await there.next_epoch()
        await there.commit(WeightRecord(version=3, path="/x", digest="d"), None)
        assert (await fleet.agenerate(REQUEST)).version_runs == [(3, 0, 1)]
        server.version = 4
        with pytest.raises(BackendError, match="'s0': 'quarantined'"):
            await fleet.agenerate(REQUEST)
    assert "version 4, the newest that was published is 3" in caplog.records[-2].reason
    await ledger.close()


async def test_a_refusal_that_another_server_does_not_share_is_a_failure():
    refusing, honest = Server(*[DataError("token 5 is outside of the vocabulary")] * 9), Server()
    async with opened(refusing, honest, max_failures=2, quarantine_s=60.0) as fleet:
        for _ in range(4):
            assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert states(fleet) == {"s0": "quarantined", "s1": "ready"}


async def test_a_refusal_that_servers_share_is_the_request_s_own_fault():
    servers = [Server(*[DataError("no such token")] * 9) for _ in range(2)]
    async with opened(*servers, max_failures=1) as fleet:
        for _ in range(3):
            with pytest.raises(DataError, match="no such token"):
                await fleet.agenerate(REQUEST)
        assert states(fleet) == {"s0": "ready", "s1": "ready"}
        assert [len(server.rids) for server in servers] == [3, 3]


def never_free() -> Server:
    """Says that it is full, and has room the next moment."""
    full = QueueFull("full")
    full.retry_after_s = 0.0
    return Server(*[full] * 1_000_000)


async def test_a_server_that_is_always_full_keeps_no_request_from_others():
    full, honest = never_free(), Server(latency_s=0.2)
    async with opened(full, honest) as fleet:
        answers = await asyncio.gather(*(fleet.agenerate(REQUEST) for _ in range(20)))
        assert all(answer.output_tokens == [7] for answer in answers)
        assert len(full.rids) <= 40


async def test_a_request_that_only_meets_full_servers_ends():
    async with opened(never_free(), wait_s=0.3) as fleet:
        with pytest.raises(BackendError, match="no generation server was ready and had room"):
            await fleet.agenerate(REQUEST)


class Breaking(Server):
    """Breaks off every request."""

    async def generate(self, request: web.Request) -> web.Response:
        self.rids.append("")
        assert request.transport is not None
        request.transport.abort()
        return web.Response()


async def test_a_server_that_breaks_off_and_comes_back_does_not_get_the_request_again(monkeypatch):
    monkeypatch.setattr(dispatch, "SAME_MOMENT_S", 0.1)
    breaking, honest = Breaking(), Server()
    async with opened(breaking, honest) as fleet:
        fleet.members.find("s1").busy_until = time.monotonic() + 0.5
        request = asyncio.create_task(fleet.agenerate(REQUEST))
        await until(lambda: states(fleet)["s0"] == "lost")
        fleet.report(report(0, breaking))
        assert states(fleet)["s0"] == "ready"
        assert (await request).output_tokens == [7]
        assert len(breaking.rids) == 1
