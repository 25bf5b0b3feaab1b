"""Every registry passes this: what gateways of one ledger know of the servers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from gateway.fleet.registry.base import ServerRegistry
from gateway.fleet.registry.make import make_registry
from gateway.fleet.registry.redis import RedisRegistry
from headway.contracts.errors import ConfigError, NotFound, StateError
from headway.contracts.http.servers import ServerReport
from tests.unit.gateway.ledger_suite import RedisServer


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.running() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[ServerRegistry]:
    is_shared = request.param == "redis"
    address = request.getfixturevalue("redis_server").address() if is_shared else ":memory:"
    registry = make_registry(address)
    await registry.open()
    yield registry
    await registry.close()


def report(name: str, **fields) -> ServerReport:
    return ServerReport(server_id=name, url="http://localhost:1", version=0, **fields)


async def test_members_are_who_reported(registry: ServerRegistry):
    assert await registry.members() == []
    await registry.announce("gw", [], 9.0)
    await registry.announce("gw", [report("b"), report("a", running=1)], 9.0)
    await registry.announce("gx", [report("b", running=2)], 9.0)
    a, b = await registry.members()
    assert (a.report, a.gateway) == (report("a", running=1), "gw")
    assert (b.report, b.gateway) == (report("b", running=2), "gx")
    assert b.number > a.number
    assert 0.0 <= a.age_s < 9.0
    assert await registry.members() != []


async def test_a_report_is_announced_with_its_age(registry: ServerRegistry):
    await registry.announce("gw", [report("a"), report("b"), report("c")], 9.0, [0.0, 5.0, 10.0])
    a, b = await registry.members()  # the lease of `c` has ended
    assert 5.0 <= b.age_s < 9.0
    assert a.age_s == pytest.approx(b.age_s - 5.0, abs=0.01)


async def test_each_report_is_news_once(registry: ServerRegistry):
    await registry.announce("gw", [report("a")], 9.0)
    (first,) = await registry.members()
    (again,) = await registry.members()
    await registry.announce("gw", [report("a")], 9.0)
    (second,) = await registry.members()
    assert first.number == again.number < second.number


async def test_a_silent_server_is_no_member(registry: ServerRegistry):
    await registry.announce("gw", [report("a"), report("b")], 1.0, [2.0, 0.0])
    assert [one.report.server_id for one in await registry.members()] == ["b"]


async def test_a_forgotten_server_is_no_member(registry: ServerRegistry):
    await registry.announce("gw", [report("a"), report("b")], 9.0)
    await registry.forget("a")
    await registry.forget("a")
    assert [one.report.server_id for one in await registry.members()] == ["b"]


async def test_an_order_to_drain_outlives_reports_and_absence(registry: ServerRegistry):
    await registry.announce("gw", [report("a"), report("b")], 9.0)
    await registry.set_draining("a", True)
    await registry.announce("gw", [report("a")], 9.0)
    assert [one.drain_requested for one in await registry.members()] == [True, False]
    await registry.announce("gw", [report("a")], 1.0, [2.0])  # its lease has ended
    assert [one.report.server_id for one in await registry.members()] == ["b"]
    await registry.announce("gx", [report("a")], 9.0)
    assert [one.drain_requested for one in await registry.members()] == [True, False]
    await registry.set_draining("a", False)
    await registry.set_draining("a", False)
    assert [one.drain_requested for one in await registry.members()] == [False, False]


async def test_only_members_can_be_held(registry: ServerRegistry):
    with pytest.raises(NotFound, match="nobody"):
        await registry.set_draining("nobody", True)


async def test_runs_with_one_redis_do_not_meet(redis_server: RedisServer):
    one, other = (make_registry(redis_server.address()) for _ in range(2))
    await one.announce("gw", [report("a")], 9.0)
    assert await other.members() == []
    for registry in (one, other):
        await registry.close()


async def test_a_redis_that_is_away_is_an_outage(tmp_path: Path):
    registry = RedisRegistry(f"unix://{tmp_path}/nobody.sock")
    with pytest.raises(StateError, match="did not answer"):
        await registry.open()
    with pytest.raises(StateError, match="did not answer"):
        await registry.announce("gw", [report("a")], 9.0)
    await registry.close()


def test_a_prefix_that_is_no_name_is_refused():
    with pytest.raises(ConfigError, match="prefix"):
        make_registry("redis://localhost/0?prefix=a%20b")
