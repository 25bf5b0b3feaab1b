"""Servers that stay at a version while others are published, and requests for exactly that version."""

from __future__ import annotations

import asyncio

import pytest

from gateway.ledger.sqlite import SqliteLedger
from gateway.publishing import reservation
from headway.contracts.errors import Conflict, NotFound, StaleVersion, SyncError
from headway.contracts.http.weights import WeightReservation
from headway.contracts.types import LLMRequest, LLMResponse, WeightUpdateMeta
from tests.unit.gateway.weight_server import Gateway, WeightServer, opened_gateway
from tests.waiting import until


def meta(version: int) -> WeightUpdateMeta:
    return WeightUpdateMeta(version, f"/v{version}")


def wanted(version: int, name: str = "e", servers: int = 1) -> WeightReservation:
    return WeightReservation(name=name, version=version, servers=servers)


async def publish(gateway: Gateway, *versions: int) -> None:
    for version in versions:
        await gateway.fleet.weights.update_weights(meta(version))


async def settled(gateway: Gateway, **states: str) -> None:
    """Heartbeats until the servers are in these states."""
    async with asyncio.timeout(10):
        while gateway.states() != states:
            gateway.heartbeat()
            await asyncio.sleep(0.005)


async def test_a_reserved_server_stays_while_versions_are_committed_on_the_others():
    servers = [WeightServer(f"s{n}") for n in range(3)]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1)
        status = await gateway.fleet.weights.reserve(wanted(1))
        assert (status.servers, status.num_ready, status.failure) == (["s0"], 3, None)
        await publish(gateway, 2, 3)
        assert [server.version for server in servers] == [1, 3, 3]
        for _ in range(4):
            gateway.heartbeat()
        assert gateway.states() == {"s0": "reserved", "s1": "ready", "s2": "ready"}
        assert (await gateway.fleet.weights.reserve(wanted(1))).num_ready == 1
        assert gateway.fleet.weights.status().reserved == 1
        await gateway.fleet.weights.end_reservation("e")
        await gateway.until_ready()
        assert [server.version for server in servers] == [3, 3, 3]


async def test_a_past_version_is_brought_to_the_server_that_shall_stay_at_it():
    servers = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1, 2)
        await gateway.fleet.weights.reserve(wanted(1))
        await settled(gateway, s0="reserved", s1="ready")
        assert [server.version for server in servers] == [1, 2]
        assert servers[0].prepares[-1].digest == "d1"


async def test_one_server_is_always_left():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await publish(gateway, 1)
        status = await gateway.fleet.weights.reserve(wanted(1, servers=4))
        assert (status.servers, status.num_ready) == ([], 1)
        await publish(gateway, 2)
        status = await gateway.fleet.weights.reserve(wanted(1, servers=4))
        assert (status.servers, status.num_ready) == ([], 0)
        gateway.servers.append(late := WeightServer("late"))
        await late.start()
        await gateway.until_ready()
        await gateway.fleet.weights.reserve(wanted(1, servers=4))
        states = {"s0": "reserved", "late": "ready"}
        await settled(gateway, **states)
        await late.stop()


async def test_another_server_takes_the_place_of_one_that_is_lost():
    servers = [WeightServer(f"s{n}") for n in range(3)]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1)
        await gateway.fleet.weights.reserve(wanted(1))
        await publish(gateway, 2)
        gateway.fleet.report(servers[0].report(draining=True))
        gateway.servers.remove(servers[0])
        status = await gateway.fleet.weights.reserve(wanted(1))
        assert status.servers == ["s1"]
        await settled(gateway, s0="draining", s1="reserved", s2="ready")
        assert servers[1].version == 1


async def test_a_version_that_is_gone_is_told_with_its_reason():
    servers = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1, 2)
        with pytest.raises(NotFound, match=r"version 7 is not kept; kept are \[1, 2\]"):
            await gateway.fleet.weights.reserve(wanted(7))
        servers[0].refusal = SyncError("no such directory")
        await gateway.fleet.weights.reserve(wanted(1))
        await settled(gateway, s0="fenced", s1="ready")
        status = await gateway.fleet.weights.reserve(wanted(1))
        assert status.num_ready == 0
        assert "s0: no such directory" in status.failure
        servers[0].refusal = None
        await gateway.fleet.weights.end_reservation("e")
        await gateway.until_ready()


async def test_a_second_name_waits_until_the_first_one_ends():
    servers = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1)
        await gateway.fleet.weights.reserve(wanted(1))
        with pytest.raises(Conflict, match="'e' has reserved version 1"):
            await gateway.fleet.weights.reserve(wanted(1, "other"))
        await gateway.fleet.weights.end_reservation("other")  # not its own: of no effect
        assert gateway.fleet.weights.status().reserved == 1
        await gateway.fleet.weights.end_reservation("e")
        await gateway.fleet.weights.reserve(wanted(1, "other"))


async def test_a_reservation_that_nobody_repeats_is_over(monkeypatch: pytest.MonkeyPatch):
    servers = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1)
        await gateway.fleet.weights.reserve(wanted(1))
        await publish(gateway, 2)
        monkeypatch.setattr(reservation, "LEASE_S", 0.0)
        await gateway.until_ready()
        assert [server.version for server in servers] == [2, 2]
        assert not gateway.fleet.has(1)


async def test_a_gateway_that_is_started_again_goes_on_with_its_reservation():
    servers = [WeightServer("s0"), WeightServer("s1")]
    ledger = SqliteLedger(":memory:")
    await ledger.open("gateway", 30.0)
    for server in servers:
        await server.start()
    async with opened_gateway(*servers, ledger=ledger) as gateway:
        await publish(gateway, 1)
        await gateway.fleet.weights.reserve(wanted(1))
        await publish(gateway, 2)
    async with opened_gateway(*servers, ledger=ledger) as gateway:
        await settled(gateway, s0="reserved", s1="ready")
        await publish(gateway, 3)
        assert [server.version for server in servers] == [1, 3]
    for server in servers:
        await server.stop()
    await ledger.close()


async def test_requests_for_a_version_go_to_its_servers_and_to_no_others():
    servers = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1)
        await gateway.fleet.weights.reserve(wanted(1))
        await publish(gateway, 2)
        for version, server, count in ((1, servers[0], 3), (None, servers[1], 3)):
            for number in range(count):
                req = LLMRequest(rid=f"r{number}", input_ids=(1,), version=version)
                response = await gateway.fleet.agenerate(req)
                assert response.version_runs == [(server.version, 0, 1)]
            assert len(server.generated) == count
        assert [req.version for req in servers[0].generated] == [1, 1, 1]
        with pytest.raises(StaleVersion, match=r"version 0 serves no more; 2 does"):
            await gateway.fleet.agenerate(LLMRequest(rid="old", input_ids=(1,), version=0))


async def test_a_request_waits_for_the_server_that_is_brought_to_its_version():
    servers = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1, 2)
        go = servers[0].holds_prepare()
        await gateway.fleet.weights.reserve(wanted(1))
        req = LLMRequest(rid="r", input_ids=(1,), version=1)
        asked: asyncio.Task[LLMResponse] = asyncio.create_task(gateway.fleet.agenerate(req))
        await until(lambda: servers[0].prepares[-1].version == 1)
        assert not asked.done()
        go.set()
        assert (await asked).version_runs == [(1, 0, 1)]
