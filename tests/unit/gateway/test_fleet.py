"""Routing around servers that are full, ill, slow, drain or are gone; real sockets, servers scripted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from gateway.app.fleet import Fleet
from gateway.fleet import dispatch
from gateway.fleet.resume import generate_whole
from gateway.ledger.sqlite import SqliteLedger
from gateway.versions.publication_state import PublicationState
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.errors import (
    BackendError,
    Conflict,
    Draining,
    LethalRequest,
    NotFound,
    QueueFull,
    RequestTooLong,
    ServiceError,
)
from headway.contracts.http.paths import GENERATE, GENERATION_ABORT
from headway.contracts.http.servers import ServerReport
from headway.contracts.types import LLMRequest
from headway.text.vocabulary import ANY, Vocabulary
from tests.unit.gateway.rollout_builders import make_response
from tests.waiting import until

REQUEST = LLMRequest(rid="r" * 128, input_ids=(1, 2))
LETHAL = LLMRequest(rid="lethal", input_ids=(6, 6, 6))
"""Whatever server gets it breaks off all that it does."""


class Server:
    """Answers what stands in `failures` first, then generations."""

    def __init__(
        self, *failures: ServiceError, latency_s: float = 0.0, max_running: int = 0
    ) -> None:
        self.failures = list(failures)
        self.latency_s = latency_s
        self.max_running = max_running
        self.rids: list[str] = []
        self.prompts: list[tuple[int, ...]] = []
        self.url = ""
        self.is_stuck = False
        """Requests end only by an abort, or with their connection."""
        self.num_left = 0
        """Requests whose client went away."""
        self._abort = asyncio.Event()
        self._running = asyncio.Semaphore(max_running or 4096)

    def app(self) -> web.Application:
        app = web.Application(handler_args={"handler_cancellation": True})
        app.router.add_post(GENERATE, self.generate)
        app.router.add_post(GENERATION_ABORT, self.abort)
        return app

    async def abort(self, request: web.Request) -> web.Response:
        self._abort.set()
        return web.Response(status=204)

    async def generate(self, request: web.Request) -> web.Response:
        req = LLMRequest.model_validate_json(await request.read())
        self.rids.append(req.rid)
        self.prompts.append(req.input_ids)
        if req.input_ids == LETHAL.input_ids and request.transport is not None:
            request.transport.abort()
        try:
            async with self._running:
                return await self.answer(req)
        except asyncio.CancelledError:
            self.num_left += 1
            raise

    async def answer(self, req: LLMRequest) -> web.Response:
        is_stuck = self.is_stuck  # at its arrival: a test may change it once it sees the request
        await asyncio.sleep(self.latency_s)
        if is_stuck:
            await self._abort.wait()
            response = make_response(req, [5, 6]).model_copy(update={"stop_reason": "interrupt"})
            return web.Response(text=response.model_dump_json())
        if not self.failures:
            return web.Response(text=make_response(req, [7]).model_dump_json())
        error = self.failures.pop(0)
        return web.Response(
            status=error.http_status,
            text=error.to_body().model_dump_json(),
            headers={"Retry-After": f"{error.retry_after_s:.0f}"},
        )


@asynccontextmanager
async def opened(
    *servers: Server,
    wait_s: float = 5.0,
    state: PublicationState | None = None,
    vocabulary: Vocabulary = ANY,
    ends: Sequence[int] = (),
    **settings,
) -> AsyncIterator[Fleet]:
    """A fleet in which the servers have reported themselves, in this order."""

    ledger = SqliteLedger(":memory:")
    await ledger.open("gateway", 30.0)
    config = FleetConfig(server_wait_s=wait_s, **settings)
    fleet = Fleet(config, state or PublicationState(ledger), vocabulary=vocabulary, ends=ends)
    runners = []
    await fleet.start()
    for index, server in enumerate(servers):
        if not server.url:
            runners.append(web.AppRunner(server.app(), shutdown_timeout=0.05))
            await runners[-1].setup()
            site = web.TCPSite(runners[-1], "127.0.0.1", 0)
            await site.start()
            server.url = "http://{}:{}".format(*runners[-1].addresses[0])
        fleet.report(report(index, server))
    try:
        yield fleet
    finally:
        await fleet.aclose()
        await ledger.close()
        for runner in runners:
            await runner.cleanup()
        await asyncio.sleep(0)  # closed transports are freed one turn later


def report(index: int, server: Server, **fields) -> ServerReport:
    known = {"server_id": f"s{index}", "url": server.url, "max_running": server.max_running}
    return ServerReport(version=0, **known | fields)


def states(fleet: Fleet) -> dict[str, str]:
    return {status.server_id: status.state for status in fleet.statuses()}


async def test_a_server_that_drains_gets_nothing_more():
    leaving, staying = Server(Draining("draining")), Server()
    async with opened(leaving, staying) as fleet:
        response = await fleet.agenerate(REQUEST)
        assert (response.rid, response.output_tokens) == (REQUEST.rid, [7])
        assert states(fleet) == {"s0": "draining", "s1": "ready"}
        await fleet.agenerate(REQUEST)
        assert (len(leaving.rids), len(staying.rids)) == (1, 2)
        fleet.report(report(0, leaving))  # a late heartbeat of before
        assert states(fleet)["s0"] == "draining"


async def test_a_report_of_a_drain_is_enough():
    leaving, staying = Server(), Server()
    async with opened(leaving, staying) as fleet:
        fleet.report(report(0, leaving, draining=True))
        await fleet.agenerate(REQUEST)
        assert (leaving.rids, len(staying.rids)) == ([], 1)


async def test_a_full_server_is_asked_again_when_it_said():
    failures = [QueueFull("full"), QueueFull("full")]
    for failure in failures:
        failure.retry_after_s = 0.0
    only = Server(*failures)
    async with opened(only) as fleet:
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert len(only.rids) == 3


async def test_a_full_server_has_room_again_as_soon_as_a_request_ends_there():
    full = QueueFull("full")
    full.retry_after_s = 600.0
    only = Server(latency_s=0.2)
    async with opened(only, wait_s=20.0) as fleet:
        first = asyncio.create_task(fleet.agenerate(REQUEST))
        while not only.rids:  # noqa: ASYNC110 - nothing to be notified by
            await asyncio.sleep(0.001)
        only.failures.append(full)  # for whichever of the two is answered first
        second = asyncio.create_task(fleet.agenerate(REQUEST))
        async with asyncio.timeout(10):
            answers = await asyncio.gather(first, second)
        assert [answer.output_tokens for answer in answers] == [[7], [7]]
        assert len(only.rids) == 3


async def test_another_server_takes_what_a_full_one_refuses():
    full, free = Server(QueueFull("full")), Server()
    async with opened(full, free) as fleet:
        await fleet.agenerate(REQUEST)
        assert states(fleet) == {"s0": "ready", "s1": "ready"}
        assert (len(full.rids), len(free.rids)) == (1, 1)


async def test_a_refused_connection_costs_no_attempt():
    gone, free = Server(), Server()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone.url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    async with opened(gone, free) as fleet:
        fleet.report(report(0, gone, running=64))
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert states(fleet) == {"s0": "lost", "s1": "ready"}
        assert fleet.statuses()[0].running == 0


async def test_a_failure_of_a_server_is_the_caller_s():
    async with opened(Server(BackendError("died"))) as fleet:
        with pytest.raises(BackendError, match="died"):
            await fleet.agenerate(REQUEST)


async def test_a_fleet_without_room_says_so_when_its_wait_is_over():
    only = Server(Draining("draining"))
    async with opened(only, wait_s=0.05) as fleet:
        with pytest.raises(BackendError, match=r"ready and had room.*'s0': 'draining'"):
            await fleet.agenerate(REQUEST)


async def test_a_request_that_is_sent_again_has_another_id_on_the_wire():
    only = Server()
    async with opened(only) as fleet:
        for _ in range(2):
            assert (await fleet.agenerate(REQUEST)).rid == REQUEST.rid
    first, second = only.rids
    assert first != second
    assert len(first) <= 128


def by_itself(fleet: Fleet) -> asyncio.Task:
    """A request that waits for its answer, and goes on where it was interrupted."""
    return asyncio.create_task(generate_whole(fleet.agenerate, str, REQUEST))


async def test_a_server_that_fails_again_and_again_rests():
    ill = Server(*[BackendError("ill")] * 3)
    async with opened(ill, max_failures=2, quarantine_s=0.2) as fleet:
        with pytest.raises(BackendError, match="ill"):
            await fleet.agenerate(REQUEST)
        assert states(fleet) == {"s0": "ready"}
        response = await fleet.agenerate(REQUEST)  # its second failure, and a trial that fails, too
        assert response.output_tokens == [7]
        assert len(ill.rids) == 4
        assert states(fleet) == {"s0": "ready"}


async def test_others_serve_while_one_is_quarantined():
    ill, well = Server(*[ServiceError("internal")] * 9), Server()
    async with opened(ill, well, max_failures=1, quarantine_s=60.0) as fleet:
        await fleet.agenerate(REQUEST)
        assert states(fleet) == {"s0": "quarantined", "s1": "ready"}
        fleet.report(report(0, ill))
        assert states(fleet)["s0"] == "quarantined"
        for _ in range(3):
            await fleet.agenerate(REQUEST)
        assert (len(ill.rids), len(well.rids)) == (1, 4)


async def test_what_a_request_brings_upon_itself_is_no_failure_of_its_server():
    server = Server(*[Conflict("known")] * 5)
    async with opened(server, max_failures=1) as fleet:
        for _ in range(5):
            with pytest.raises(Conflict):
                await fleet.agenerate(REQUEST)
        assert states(fleet) == {"s0": "ready"}


async def test_a_request_begins_anew_elsewhere_when_its_server_is_lost():
    dying, other = Server(), Server()
    dying.is_stuck = True
    async with opened(dying, other, lease_s=0.2) as fleet:
        task = asyncio.create_task(fleet.agenerate(REQUEST))
        await until(lambda: dying.rids)

        def heartbeat_of_the_other() -> bool:
            fleet.report(report(1, other))
            return task.done()

        await until(heartbeat_of_the_other)
        assert task.result().output_tokens == [7]
        assert states(fleet)["s0"] == "lost"


@pytest.mark.parametrize(
    ("has_died", "num_lost", "error", "told"),
    [
        (True, 2, LethalRequest, r"2 prompt tokens and gconfig={'min_p': 0.5} was in flight at s., s. "),
        (False, 3, BackendError, "was lost"),
    ],
    ids=["died", "fell silent"],
)  # fmt: skip
async def test_a_request_that_kills_its_servers_does_not_kill_them_all(
    monkeypatch, has_died: bool, num_lost: int, error: type[ServiceError], told: str
):
    servers = [Server() for _ in range(5)]
    for server in servers:
        server.is_stuck = True
    monkeypatch.setattr(dispatch, "SAME_MOMENT_S", 0.0)
    req = REQUEST.model_copy(update={"gconfig": SamplingConfig(min_p=0.5)})
    async with opened(*servers) as fleet:

        def playing() -> list[str]:
            known = states(fleet)
            names = [f"s{index}" for index, server in enumerate(servers) if server.rids]
            return [name for name in names if known[name] == "ready"]

        task = asyncio.create_task(fleet.agenerate(req))
        for _ in range(num_lost):
            await until(playing)
            member = fleet.members.find(playing()[0])
            fleet.members.lose(member, "killed", has_died=has_died)
        with pytest.raises(error, match=told):
            await task
        assert sorted(states(fleet).values()).count("lost") == num_lost


async def test_servers_that_die_together_count_once():
    servers = [Server() for _ in range(3)]
    servers[0].is_stuck = True
    async with opened(*servers) as fleet:
        task = asyncio.create_task(fleet.agenerate(REQUEST))
        await until(lambda: servers[0].rids)
        for member in fleet.members.ready()[:2]:
            fleet.members.lose(member, "the machine is gone", has_died=True)
        assert (await task).output_tokens == [7]
        assert servers[2].rids


async def test_others_are_served_after_a_request_has_killed_its_servers(monkeypatch):
    monkeypatch.setattr(dispatch, "SAME_MOMENT_S", 0.0)
    async with opened(*(Server() for _ in range(4))) as fleet:
        with pytest.raises(LethalRequest, match="3 prompt tokens"):
            await fleet.agenerate(LETHAL)
        assert sorted(states(fleet).values()) == ["lost", "lost", "ready", "ready"]
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]


async def test_a_drain_moves_what_runs_with_its_tokens():
    leaving, staying = Server(), Server()
    leaving.is_stuck = True
    async with opened(leaving, staying) as fleet:
        task = by_itself(fleet)
        await until(lambda: leaving.rids)
        status = await fleet.drain("s0")
        assert (status.server_id, status.state) == ("s0", "draining")
        assert (await task).output_tokens == [5, 6, 7]
        assert staying.prompts == [(*REQUEST.input_ids, 5, 6)]
        assert fleet.report(report(0, leaving)).state == "draining"
        await fleet.agenerate(REQUEST)
        assert len(leaving.rids) == 1


async def test_a_drain_lasts_until_it_is_undone():
    only = Server()
    async with opened(only, wait_s=0.3) as fleet:
        await fleet.drain("s0")
        fleet.report(report(0, only, uptime_s=5.0))
        with pytest.raises(BackendError, match="draining"):
            await fleet.agenerate(REQUEST)
        fleet.members.lose(fleet.members.find("s0"), "test")
        assert fleet.report(report(0, only)).state == "draining"
        assert (await fleet.drain("s0", drain=False)).state == "ready"
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]


async def test_drains_that_cannot_be():
    only = Server()
    async with opened(only) as fleet:
        with pytest.raises(NotFound, match=r"'nobody' is here; known: .'s0'"):
            await fleet.drain("nobody")
        fleet.report(report(0, only, draining=True))
        await fleet.drain("s0")
        with pytest.raises(Conflict, match="shuts down"):
            await fleet.drain("s0", drain=False)


async def test_a_slow_answer_is_asked_for_twice_and_the_loser_is_ended():
    slow, fast = Server(), Server()
    slow.is_stuck = True
    async with opened(slow, fast, hedge_after_s=0.05) as fleet:
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert (len(slow.rids), len(fast.rids)) == (1, 1)
        await until(lambda: slow.num_left == 1)
        assert states(fleet) == {"s0": "ready", "s1": "ready"}
        slow.is_stuck = False
        await fleet.agenerate(REQUEST)
        assert fast.num_left == 0


async def test_a_hedge_that_fails_leaves_the_first_one_alone():
    slow, ill = Server(latency_s=0.2), Server(BackendError("ill"))
    async with opened(slow, ill, hedge_after_s=0.01) as fleet:
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert len(ill.rids) == 1


async def test_without_a_second_server_nothing_is_hedged():
    only = Server(latency_s=0.05)
    async with opened(only, hedge_after_s=0.01) as fleet:
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert len(only.rids) == 1


@pytest.mark.parametrize("told", [True, False], ids=["capacity_told", "capacity_unknown"])
async def test_a_server_with_more_room_gets_more_of_the_work(told: bool):
    small, big = Server(latency_s=0.01, max_running=2), Server(latency_s=0.01, max_running=8)
    async with opened(small, big) as fleet:
        for index, server in enumerate((small, big)):
            fleet.report(report(index, server, **({} if told else {"max_running": 0})))
        queue = iter(range(300))

        async def play() -> None:
            for _ in queue:
                await fleet.agenerate(REQUEST)

        await asyncio.gather(*(play() for _ in range(20)))
        assert len(small.rids) + len(big.rids) == 300
        assert 2.5 * len(small.rids) < len(big.rids)


def of_length(num_tokens: int) -> LLMRequest:
    """A request that ends with so many tokens, at most."""
    gconfig = SamplingConfig(max_new_tokens=num_tokens - 2)
    return LLMRequest(rid="long", input_ids=(1, 2), gconfig=gconfig)


async def test_a_request_goes_where_it_can_be_held():
    small, big = Server(), Server()
    async with opened(small, big, hedge_after_s=0.01) as fleet:
        fleet.report(report(0, small, max_context_tokens=10))
        fleet.report(report(1, big, max_context_tokens=20))
        big.latency_s = 0.1  # long enough for a second server to be looked for
        for _ in range(3):
            await fleet.agenerate(of_length(20))
        assert (len(small.rids), len(big.rids)) == (0, 3)
        big.latency_s = 0.0
        await asyncio.gather(*(fleet.agenerate(of_length(10)) for _ in range(8)))
        assert small.rids


async def test_what_no_server_can_hold_is_refused_at_once():
    small, big = Server(), Server()
    async with opened(small, big, wait_s=60.0) as fleet:
        fleet.report(report(0, small, max_context_tokens=10))
        fleet.report(report(1, big, max_context_tokens=20))
        seen = "2 prompt tokens \\+ max_new_tokens=19 exceed the context of 20"
        with pytest.raises(RequestTooLong, match=seen):
            await fleet.agenerate(of_length(21))
        assert (small.rids, big.rids) == ([], [])
        assert states(fleet) == {"s0": "ready", "s1": "ready"}


async def test_a_long_request_waits_for_a_server_that_drains_or_its_successor():
    small, big = Server(), Server()
    async with opened(small, big, wait_s=20.0) as fleet:
        fleet.report(report(0, small, max_context_tokens=10))
        fleet.report(report(1, big, max_context_tokens=20, draining=True))
        asked = asyncio.create_task(fleet.agenerate(of_length(20)))
        await asyncio.sleep(0)
        fleet.report(ServerReport(server_id="s2", url=big.url, version=0, max_context_tokens=20))
        assert (await asked).output_tokens == [7]
        assert (small.rids, len(big.rids)) == ([], 1)


async def test_what_a_server_at_the_same_address_held_before_does_not_count():
    only = Server()
    async with opened(only, wait_s=60.0) as fleet:
        fleet.report(report(0, only, max_context_tokens=20))
        fleet.report(report(1, only, max_context_tokens=10))
        with pytest.raises(RequestTooLong, match="exceed the context of 10"):
            await fleet.agenerate(of_length(11))


async def test_a_server_that_tells_no_limit_is_asked():
    only = Server(RequestTooLong("too long"))
    async with opened(only) as fleet:
        with pytest.raises(RequestTooLong, match="too long"):
            await fleet.agenerate(of_length(10**6))
        assert len(only.rids) == 1


async def test_a_server_with_another_tokenizer_gets_nothing_and_says_why():
    fitting, other = Server(), Server()
    async with opened(fitting, other, vocabulary=Vocabulary(num_tokens=9, digest="d")) as fleet:
        answer = fleet.report(report(1, other, vocab_size=7, tokenizer_digest="e"))
        assert answer.state == "fenced"
        assert "7 token ids and tokenizer e, the gateway's tokenizer has 9 tokens" in answer.reason
        (shown,) = [one for one in fleet.statuses() if one.server_id == "s1"]
        assert shown.reason == answer.reason
        for _ in range(3):
            await fleet.agenerate(REQUEST)
        assert (len(fitting.rids), len(other.rids)) == (3, 0)
        fleet.report(report(1, other, vocab_size=9, tokenizer_digest="d"))
        assert states(fleet) == {"s0": "ready", "s1": "ready"}
