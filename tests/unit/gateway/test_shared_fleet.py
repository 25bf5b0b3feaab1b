"""Two gateways with one ledger and one registry: they see the same servers and the same versions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gateway.app.fleet import Fleet
from gateway.fleet.registry.memory import MemoryRegistry
from gateway.publishing import membership_sync
from gateway.versions import shared_lock
from gateway.versions.publication_state import PublicationState
from gateway.versions.shared_lock import SharedLock
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.http.weights import WeightRecord, WeightReservation
from headway.contracts.types import WeightUpdateMeta
from tests.unit.gateway.shared_notes import SharedNotes
from tests.unit.gateway.weight_server import Gateway, WeightServer
from tests.waiting import until


class Store:
    """What two gateways share, with the servers of each."""

    def __init__(self) -> None:
        self.notes = SharedNotes()
        self.registry = MemoryRegistry()

    @asynccontextmanager
    async def gateway(self, *servers: WeightServer, **settings) -> AsyncIterator[Gateway]:
        state = PublicationState(self.notes)
        await state.open()
        fleet = Fleet(FleetConfig(**settings), state, registry=self.registry)
        started = [server for server in servers if not server.url]
        for server in started:
            await server.start()
        await fleet.start()
        try:
            yield Gateway(fleet, state, list(servers))
        finally:
            await fleet.aclose()
            for server in started:
                await server.stop()
            await asyncio.sleep(0)  # closed transports are freed one turn later


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(membership_sync, "INTERVAL_S", 0.01)
    monkeypatch.setattr(shared_lock, "LOOK_S", 0.01)
    return Store()


@asynccontextmanager
async def two(store: Store, **settings) -> AsyncIterator[tuple[Gateway, Gateway]]:
    """Server `a` reports to the first, `b` to the second; both are ready for both."""
    async with (
        store.gateway(WeightServer("a"), **settings) as one,
        store.gateway(WeightServer("b"), **settings) as other,
    ):
        await until_all(one, other, {"a": "ready", "b": "ready"})
        yield one, other


async def until_all(one: Gateway, other: Gateway, states: dict[str, str]) -> None:
    """Heartbeats until both gateways see these states."""

    def are_seen() -> bool:
        one.heartbeat()
        other.heartbeat()
        return one.states() == other.states() == states

    await until(are_seen)


def update(version: int, path: str = "/w") -> WeightUpdateMeta:
    return WeightUpdateMeta(version, f"{path}/{version}")


async def test_each_gateway_sees_all_servers(store: Store):
    async with two(store) as (one, other):
        urls = {server.url for gateway in (one, other) for server in gateway.servers}
        for gateway in (one, other):
            assert {status.url for status in gateway.fleet.statuses()} == urls


async def test_a_version_published_through_one_serves_on_all(store: Store):
    async with two(store) as (one, other):
        changed = other.state.changed.event()
        assert await one.fleet.weights.update_weights(update(1)) == 1
        assert [gateway.servers[0].version for gateway in (one, other)] == [1, 1]
        await until(lambda: other.fleet.version == 1)
        assert changed.is_set()
        assert await other.fleet.weights.update_weights(update(2)) == 2
        await until(lambda: one.fleet.version == 2)
        await until_all(one, other, {"a": "ready", "b": "ready"})
        assert one.state.epoch == other.state.epoch


async def test_nobody_is_fenced_while_another_gateway_publishes(store: Store):
    async with two(store) as (one, other):
        go = other.servers[0].holds_commit()
        publishing = asyncio.create_task(one.fleet.weights.update_weights(update(1)))
        await until(lambda: one.servers[0].version == 1)
        for _ in range(20):  # the one serves it, the other does not yet
            one.heartbeat()
            other.heartbeat()
            await asyncio.sleep(0.01)
            assert set(other.states().values()) == {"ready"}
            assert set(one.states().values()) == {"ready"}
        go.set()
        await publishing
        await until_all(one, other, {"a": "ready", "b": "ready"})
        assert other.servers[0].prepares == other.servers[0].prepares[:1]  # nothing to catch up


async def test_versions_that_come_faster_than_reports_fence_nobody(store: Store, caplog):
    async with two(store) as (one, other):
        await exchange(other, one)
        for version in range(1, 5):
            before = other.servers[0].report()
            await one.fleet.weights.update_weights(update(version))
            other.fleet.report(before)
            await exchange(other, one)
        assert fences(caplog) == []
        assert [order.version for order in other.servers[0].prepares] == [1, 2, 3, 4]


async def test_who_goes_astray_is_fenced_and_brought_back(store: Store, caplog):
    async with two(store) as (one, other):
        await one.fleet.weights.update_weights(update(1))
        await until_all(one, other, {"a": "ready", "b": "ready"})
        (stray,) = other.servers
        stray.version, stray.digest = 0, ""
        await until(lambda: other.heartbeat() or stray.version == 1)
        await until_all(one, other, {"a": "ready", "b": "ready"})
        assert any(reason.startswith("it reports version 0") for reason in fences(caplog))


async def exchange(*gateways: Gateway) -> None:
    """Each tells what it heard, hears the others, and has judged all of it."""
    for gateway in gateways:
        await gateway.fleet.drain("a", drain=False)  # nothing drains: that changes nothing else


def fences(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why servers were fenced."""
    return [each.reason for each in caplog.records if each.message == "server fenced"]


async def test_who_could_not_stage_is_fenced_everywhere_and_caught_up_by_its_own(store: Store):
    async with two(store, straggler_s=0.0, quorum=0.5) as (one, other):
        slow = other.servers[0]
        slow.refusal = SyncError("no space")
        assert await one.fleet.weights.update_weights(update(1)) == 1
        await until(lambda: other.states()["b"] == "fenced")
        assert one.states()["b"] == "fenced"
        slow.refusal = None
        await until_all(one, other, {"a": "ready", "b": "ready"})
        assert slow.version == 1


async def test_publications_take_turns_and_a_repeat_elsewhere_is_no_work(store: Store):
    async with two(store) as (one, other):
        go = one.servers[0].holds_prepare()
        first = asyncio.create_task(one.fleet.weights.update_weights(update(1)))
        await until(lambda: one.servers[0].prepares)
        again = asyncio.create_task(other.fleet.weights.update_weights(update(1)))
        second = asyncio.create_task(other.fleet.weights.update_weights(update(2)))
        await asyncio.sleep(0.1)
        assert len(one.servers[0].prepares) == 1
        go.set()
        assert await asyncio.gather(first, again, second) == [1, 1, 2]
        epochs = [order.epoch for order in one.servers[0].prepares]
        assert len(epochs) == 2
        assert epochs == sorted(epochs)


async def test_a_gateway_that_dies_while_it_publishes_is_succeeded(store: Store):
    async with store.gateway(WeightServer("b"), lease_s=0.4) as other:
        first = WeightServer("a")
        await first.start()
        async with store.gateway(first, lease_s=0.4) as one:
            await until_all(one, other, {"a": "ready", "b": "ready"})
            first.holds_prepare()
            dying = asyncio.create_task(one.fleet.weights.update_weights(update(1)))
            await until(lambda: first.prepares)
            # What a kill leaves behind: the note of the turn, and an epoch without a version.
            left = dict(store.notes.notes)
            dying.cancel()
            await asyncio.gather(dying, return_exceptions=True)
            store.notes.notes.update(left)
        first.on_prepare = None
        other.servers.append(first)  # it reports to the next
        publishing = asyncio.create_task(other.fleet.weights.update_weights(update(1)))
        await until(lambda: other.heartbeat() or publishing.done())
        assert publishing.result() == 1
        assert (first.version, other.servers[0].version) == (1, 1)
        await first.stop()


async def test_a_gateway_that_was_overtaken_commits_nothing(store: Store):
    one, other = PublicationState(store.notes), PublicationState(store.notes)
    await one.open()
    await other.open()
    epoch = await one.next_epoch(2)
    assert await other.next_epoch(2) > epoch
    with pytest.raises(Fenced, match="another gateway"):
        await one.commit(WeightRecord(version=1, path="/w"), None)
    await other.commit(WeightRecord(version=1, path="/w"), None)
    await one.refresh()
    assert one.version == other.version == 1


async def test_epochs_are_unique_over_gateways(store: Store):
    books = [PublicationState(store.notes) for _ in range(4)]
    for state in books:
        await state.open()
    epochs = await asyncio.gather(*(state.next_epoch(1) for state in books for _ in range(10)))
    assert len(set(epochs)) == 40


async def test_the_turn_is_one_s_only(store: Store):
    turns = [SharedLock(store.notes, 30.0) for _ in range(3)]
    holders = most = 0

    async def work(shared_lock: SharedLock) -> None:
        nonlocal holders, most
        async with shared_lock.held():
            holders += 1
            most = max(most, holders)
            await asyncio.sleep(0.01)
            holders -= 1

    await asyncio.gather(*(work(shared_lock) for shared_lock in turns for _ in range(3)))
    assert most == 1


async def test_the_turn_of_a_former_process_at_the_same_place_is_not_waited_for(store: Store):
    former, heir = (SharedLock(store.notes, 30.0, "here") for _ in range(2))
    async with asyncio.timeout(10.0), former.held(), heir.held():
        await former.look()
        assert not former.is_elsewhere
        other = SharedLock(store.notes, 30.0, "there")
        await other.look()
        assert other.is_elsewhere


async def test_who_starts_again_gives_back_the_turn_that_it_held(store: Store):
    former, other = (SharedLock(store.notes, 30.0, place) for place in ("here", "there"))
    async with asyncio.timeout(10.0), former.held():
        await other.inherit()
        await other.look()
        assert other.is_elsewhere
        await SharedLock(store.notes, 30.0, "here").inherit()
        async with other.held():
            pass


async def test_a_drain_holds_on_every_gateway(store: Store):
    async with two(store) as (one, other):
        await other.fleet.drain("a")
        await until_all(one, other, {"a": "draining", "b": "ready"})
        await one.fleet.drain("a", drain=False)
        await until_all(one, other, {"a": "ready", "b": "ready"})


async def test_a_server_that_goes_over_to_another_gateway_stays(store: Store):
    async with two(store, lease_s=0.5) as (one, other):
        moved = one.servers.pop()
        other.servers.append(moved)
        for _ in range(40):
            other.heartbeat()
            await asyncio.sleep(0.02)
            assert one.states()["a"] == other.states()["a"] == "ready"


async def test_a_store_that_is_away_costs_no_server(store: Store):
    async with two(store, lease_s=0.3) as (one, other):
        store.notes.is_away = True
        for _ in range(30):
            one.heartbeat()
            other.heartbeat()
            await asyncio.sleep(0.02)
            assert one.states() == other.states() == {"a": "ready", "b": "ready"}
        store.notes.is_away = False
        await one.fleet.weights.update_weights(update(1))
        await until_all(one, other, {"a": "ready", "b": "ready"})


@pytest.mark.parametrize("group_rank", ["a", "b"], ids=["own", "of_the_other_gateway"])
async def test_a_server_that_is_reserved_through_one_stays_for_all(store: Store, group_rank: str):
    async with two(store) as (one, other):
        await one.fleet.weights.update_weights(update(1))
        await until_all(one, other, {"a": "ready", "b": "ready"})
        busy = one.fleet.members.find("a" if group_rank == "b" else "b")
        busy.outstanding = 9  # the other one has less to do
        await one.fleet.weights.reserve(WeightReservation(name="e", version=1))
        await other.fleet.weights.update_weights(update(2))
        states = {"a": "ready", "b": "ready", group_rank: "reserved"}
        await until_all(one, other, states)
        versions = {
            server.name: server.version for gateway in (one, other) for server in gateway.servers
        }
        assert versions == {"a": 2, "b": 2, group_rank: 1}
        assert other.fleet.has(1)
        await other.fleet.weights.end_reservation("e")
        await until_all(one, other, {"a": "ready", "b": "ready"})
        assert {server.version for gateway in (one, other) for server in gateway.servers} == {2}


async def test_what_a_server_answered_is_not_undone_by_what_it_had_told_another(store: Store):
    async with two(store) as (one, other):
        before = other.servers[0].report()
        await one.fleet.weights.update_weights(update(1))
        member = one.fleet.members.find("b")
        assert one.fleet.members.on_shared_report(before, age_s=1.0) is None
        assert member.report.version == 1


async def test_a_report_is_as_old_as_it_is_however_late_it_is_announced(
    store: Store, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(membership_sync, "INTERVAL_S", 3600.0)
    async with (
        store.gateway(WeightServer("a")) as one,
        store.gateway(WeightServer("b")) as other,
    ):

        async def both_sync() -> None:
            for gateway in (other, one):
                await gateway.fleet.membership.sync()

        one.heartbeat()
        other.heartbeat()
        await both_sync()
        other.heartbeat()  # told to the other gateway, which has not announced it yet
        await one.fleet.weights.update_weights(update(1))
        await both_sync()
        assert one.fleet.members.find("b").report.version == 1
