"""Routing around servers that are full, drain or are gone; real sockets, servers scripted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from rollout_builders import make_response

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.errors import BackendError, Draining, QueueFull, ServiceError
from headway.contracts.http import GENERATE, ServerReport
from headway.contracts.types import LLMRequest
from headway.rollout.fleet import Fleet
from headway.rollout.ledger.sqlite import SqliteLedger
from headway.rollout.weight_book import WeightBook

REQUEST = LLMRequest(rid="r" * 128, input_ids=(1, 2))


class Server:
    """Answers what stands in `failures` first, then generations."""

    def __init__(self, *failures: ServiceError) -> None:
        self.failures = list(failures)
        self.rids: list[str] = []
        self.url = ""

    async def generate(self, request: web.Request) -> web.Response:
        req = LLMRequest.model_validate_json(await request.read())
        self.rids.append(req.rid)
        if not self.failures:
            return web.Response(text=make_response(req, [7]).model_dump_json())
        error = self.failures.pop(0)
        return web.Response(
            status=error.http_status,
            text=error.to_body().model_dump_json(),
            headers={"Retry-After": f"{error.retry_after_s:.0f}"},
        )


@asynccontextmanager
async def opened(*servers: Server, wait_s: float = 5.0) -> AsyncIterator[Fleet]:
    """A fleet in which the servers have reported themselves, in this order."""

    ledger = SqliteLedger(":memory:")
    await ledger.open("gateway", 30.0)
    fleet = Fleet(FleetConfig(server_wait_s=wait_s), WeightBook(ledger))
    runners = []
    await fleet.start()
    for index, server in enumerate(servers):
        if not server.url:
            app = web.Application()
            app.router.add_post(GENERATE, server.generate)
            runners.append(web.AppRunner(app))
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
    return ServerReport(server_id=f"s{index}", url=server.url, version=0, **fields)


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
        assert (await fleet.agenerate(REQUEST)).output_tokens == [7]
        assert states(fleet) == {"s0": "lost", "s1": "ready"}


async def test_a_failure_of_a_server_is_the_caller_s():
    async with opened(Server(BackendError("died"))) as fleet:
        with pytest.raises(BackendError, match="died"):
            await fleet.agenerate(REQUEST)


async def test_a_fleet_without_room_says_so_after_its_patience():
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
    assert len(first) == 128
