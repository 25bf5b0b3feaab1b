"""Servers that join, missed a version or changed theirs come to what is committed before they serve."""

from __future__ import annotations

import asyncio

import pytest

from headway.contracts.http.weights import WeightPrepareRequest
from headway.contracts.types import WeightUpdateMeta
from tests.unit.gateway.weight_server import DEADLINE_S, WeightServer, opened_gateway
from tests.waiting import until


def meta(version: int, scheme: str = "/") -> WeightUpdateMeta:
    return WeightUpdateMeta(version, f"{scheme}v{version}")


@pytest.fixture
async def late():
    server = WeightServer("late")
    await server.start()
    yield server
    await server.stop()


async def test_a_late_server_is_told_of_peers_that_hold_the_version(late: WeightServer):
    early = [WeightServer(f"s{index}") for index in range(6)]
    async with opened_gateway(*early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        assert early[0].prepares[0].fallbacks == ()
        gateway.servers.append(late)
        await gateway.until_ready()
        order = late.prepares[0]
        peers = {f"{server.url}/v1/weights/held/1" for server in early}
        assert (order.path, order.digest, order.group_rank) == ("/v1", "d1", None)
        assert len(order.fallbacks) == 3
        assert set(order.fallbacks) < peers


async def test_who_is_late_for_a_process_group_fetches_from_peers_only(late: WeightServer):
    early = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/"))
        gateway.servers.append(late)
        await gateway.until_ready()
        order = late.prepares[0]
        assert order.group_rank is None
        assert {order.path, *order.fallbacks} == {
            f"{server.url}/v1/weights/held/1" for server in early
        }


async def test_who_is_late_for_a_process_group_without_peers_stays_fenced(late: WeightServer):
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/"))
        gateway.fleet.report(only.report(draining=True))
        gateway.fleet.report(late.report())
        await until(lambda: gateway.states()["late"] == "fenced")
        [order] = late.prepares  # it might have it staged: nobody else can give it
        assert (order.digest, order.group_rank) == ("d1", None)
        assert late.commits == []


async def test_a_slow_joiner_keeps_no_publication_waiting_and_ends_at_the_newest(
    late: WeightServer,
):
    early = WeightServer("s0")
    async with opened_gateway(early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        go = late.holds_prepare()
        gateway.servers.append(late)
        gateway.heartbeat()
        await until(lambda: late.prepares)
        await gateway.fleet.weights.update_weights(meta(2))
        assert gateway.states() == {"s0": "ready", "late": "joining"}
        go.set()
        await gateway.until_ready()
        assert [order.version for order in late.prepares] == [1, 2]
        assert [order.version for order in late.commits] == [2]


async def test_a_joiner_leaves_a_version_that_nobody_holds_any_more_for_the_next(
    late: WeightServer,
):
    never = asyncio.Event()

    async def fetch(order: WeightPrepareRequest) -> None:
        if order.version == 1:
            await never.wait()

    late.on_prepare = fetch
    early = WeightServer("s0")
    async with opened_gateway(early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        gateway.fleet.report(early.report(draining=True))
        gateway.servers[:] = [late]
        gateway.heartbeat()
        await until(lambda: late.prepares)
        await gateway.fleet.weights.update_weights(meta(2))
        async with asyncio.timeout(DEADLINE_S):
            while gateway.states()["late"] != "ready":
                gateway.heartbeat()
                await asyncio.sleep(0.005)
        assert [order.version for order in late.prepares] == [1, 2]
        assert [order.version for order in late.commits] == [2]
        never.set()


async def test_a_version_that_comes_during_the_swap_is_caught_up_too(late: WeightServer):
    early = WeightServer("s0")
    async with opened_gateway(early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        go = late.holds_commit()
        gateway.servers.append(late)
        gateway.heartbeat()
        await until(lambda: late.commits)
        await gateway.fleet.weights.update_weights(meta(2))
        go.set()
        await until(lambda: gateway.states()["late"] == "ready")
        assert [order.version for order in late.commits] == [1, 2]


async def test_a_joiner_becomes_ready_while_a_publication_is_under_way(late: WeightServer):
    early = WeightServer("s0")
    async with opened_gateway(early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        go = early.holds_prepare()
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(2)))
        await until(lambda: len(early.prepares) == 2)
        gateway.servers.append(late)
        await gateway.until_ready()
        assert late.version == 1
        go.set()
        await publication
        assert gateway.states() == {"s0": "ready", "late": "fenced"}
        await gateway.until_ready()
        assert late.version == 2


async def test_another_digest_of_the_same_version_is_not_trusted(late: WeightServer):
    early = WeightServer("s0")
    async with opened_gateway(early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        late.version, late.digest = 1, "other"
        gateway.servers.append(late)
        await gateway.until_ready()
        assert late.digest == "d1"
        assert late.prepares[0].digest == "d1"


async def test_a_server_that_does_not_know_its_digest_is_trusted(late: WeightServer):
    early = WeightServer("s0")
    async with opened_gateway(early) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        late.version = 1
        assert gateway.fleet.report(late.report()).state == "ready"


async def test_a_report_from_before_a_commit_that_comes_after_it_changes_nothing():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        before = only.report()
        await gateway.fleet.weights.update_weights(meta(1))
        for _ in range(3):
            assert gateway.fleet.report(before).state == "ready"
            assert gateway.fleet.report(only.report()).state == "ready"
        assert len(only.prepares) == 1


async def test_reports_of_the_old_version_during_the_commits_change_nothing():
    servers = [WeightServer("s0"), WeightServer("s1")]
    go = servers[1].holds_commit()
    async with opened_gateway(*servers) as gateway:
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: servers[1].commits)
        for _ in range(3):
            gateway.heartbeat()
        assert set(gateway.states().values()) == {"ready"}
        go.set()
        await publication


async def test_a_version_that_changed_behind_the_gateway_is_changed_back():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        only.version, only.digest = 9, "d9"
        gateway.heartbeat()
        assert gateway.states() == {"s0": "ready"}  # it may have been said before the commit
        gateway.heartbeat()
        assert gateway.states() == {"s0": "fenced"}
        await gateway.until_ready()
        assert only.version == 1


async def test_a_server_that_restarted_takes_no_traffic_from_its_first_report_on():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        only.uptime_s, only.version, only.digest = 0.5, 0, ""
        gateway.heartbeat()
        assert gateway.states() == {"s0": "joining"}
        await gateway.until_ready()
        assert only.version == 1


async def test_a_server_at_another_one_s_address_replaces_it():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        only.version, only.digest = 0, ""
        gateway.fleet.report(only.report(server_id="s0-again"))
        assert gateway.states() == {"s0": "lost", "s0-again": "joining"}


async def test_two_joiners_of_a_version_that_nobody_proved_end_with_the_same():
    first, second = WeightServer("s0"), WeightServer("s1")
    second.digests[1] = "torn"
    async with opened_gateway() as gateway:
        await gateway.fleet.weights.update_weights(meta(1))
        for server in (first, second):
            await server.start()
        go = second.holds_prepare()
        gateway.servers += [first, second]
        gateway.heartbeat()
        await until(lambda: gateway.states()["s0"] == "ready" and second.prepares)
        go.set()
        await until(lambda: gateway.states()["s1"] == "fenced")
        assert (second.version, second.commits) == (0, [])
        second.digests.clear()
        await gateway.until_ready()
        for server in (first, second):
            await server.stop()
