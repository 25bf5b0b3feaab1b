"""Going back to a kept version, and holding one while others are published."""

from __future__ import annotations

import pytest

from gateway.ledger.sqlite import SqliteLedger
from gateway.versions.publication_state import KEEP, PublicationState
from headway.contracts.errors import Conflict, NotFound, SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.unit.gateway.weight_server import Gateway, WeightServer, opened_gateway


def meta(version: int, scheme: str = "/") -> WeightUpdateMeta:
    return WeightUpdateMeta(version, f"{scheme}v{version}")


async def publish(gateway: Gateway, *versions: int) -> None:
    for version in versions:
        await gateway.fleet.weights.update_weights(meta(version))


async def test_a_rollback_serves_the_kept_version_until_the_next_publication():
    servers = [WeightServer("s0"), WeightServer("s1")]
    async with opened_gateway(*servers) as gateway:
        await publish(gateway, 1, 2, 3)
        status = await gateway.fleet.weights.rollback(1)
        assert (status.committed.version, status.head, status.pinned) == (1, 3, None)
        assert [server.version for server in servers] == [1, 1]
        assert servers[0].prepares[-1].digest == "d1"
        assert (
            await gateway.fleet.weights.update_weights(meta(3)) == 1
        )  # a late repeat undoes nothing
        gateway.heartbeat()
        assert set(gateway.states().values()) == {"ready"}
        await publish(gateway, 4)
        assert [server.version for server in servers] == [4, 4]


async def test_a_rollback_to_what_serves_is_no_work():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await publish(gateway, 1)
        await gateway.fleet.weights.rollback(1)
        assert len(only.prepares) == 1


async def test_a_rollback_to_a_version_that_is_gone_leaves_what_serves():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await publish(gateway, 1, 2)
        with pytest.raises(NotFound, match=r"version 7 is not kept; kept are \[1, 2\]"):
            await gateway.fleet.weights.rollback(7)
        only.refusal = SyncError("no such directory")
        with pytest.raises(SyncError, match="version 1 was not committed, 2 goes on serving"):
            await gateway.fleet.weights.rollback(1)
        assert (gateway.fleet.version, only.version) == (2, 2)


async def test_a_rollback_to_what_came_through_a_group_needs_somebody_who_holds_it():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/"))
        await publish(gateway, 2)
        with pytest.raises(SyncError, match="came through a process group"):
            await gateway.fleet.weights.rollback(1)
        assert gateway.fleet.version == 2


async def test_a_pin_holds_while_others_are_published_and_its_end_goes_on_with_the_newest():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await publish(gateway, 1, 2)
        assert (await gateway.fleet.weights.pin(1)).pinned == 1
        assert await gateway.fleet.weights.update_weights(meta(3)) == 1
        assert (only.version, gateway.fleet.head) == (1, 3)
        with pytest.raises(Conflict, match="version 1 is pinned and nobody would hold version 4"):
            await gateway.fleet.weights.update_weights(meta(4, "nccl://trainer:1/"))
        with pytest.raises(Conflict, match="version 1 is pinned; release it, or pin 2"):
            await gateway.fleet.weights.rollback(2)
        status = await gateway.fleet.weights.pin(None)
        assert (status.committed.version, status.pinned, only.version) == (3, None, 3)


async def test_what_is_published_under_a_pin_and_given_up_is_forgotten():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await publish(gateway, 1)
        await gateway.fleet.weights.pin(1)
        await publish(gateway, 2)
        await gateway.fleet.weights.cancel_update(2)
        assert (gateway.fleet.head, gateway.fleet.version) == (1, 1)
        await publish(gateway, 2)
        assert gateway.fleet.head == 2


async def test_ending_no_pin_does_not_end_a_rollback():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await publish(gateway, 1, 2)
        await gateway.fleet.weights.rollback(1)
        assert (await gateway.fleet.weights.pin(None)).committed.version == 1


async def test_a_pin_survives_a_restart():
    only = WeightServer("s0")
    ledger = SqliteLedger(":memory:")
    await ledger.open("gateway", 30.0)
    async with opened_gateway(only, ledger=ledger) as gateway:
        await publish(gateway, 1, 2)
        await gateway.fleet.weights.pin(1)
        async with opened_gateway(only, ledger=ledger) as successor:
            status = successor.fleet.weights.status()
            assert (status.pinned, status.committed.version, status.head) == (1, 1, 2)
            assert set(successor.states().values()) == {"ready"}
    await ledger.close()


async def test_the_newest_versions_are_kept_and_the_pinned_one():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await publish(gateway, 1, 2)
        await gateway.fleet.weights.pin(1)
        await publish(gateway, *range(3, KEEP + 5))
        kept = [record.version for record in gateway.fleet.weights.status().kept]
        assert kept == [1, *range(6, KEEP + 5)]
        assert len(kept) == KEEP


async def test_a_book_is_the_same_after_it_was_read_again():
    ledger = SqliteLedger(":memory:")
    await ledger.open("gateway", 30.0)
    only = WeightServer("s0")
    async with opened_gateway(only, ledger=ledger) as gateway:
        await publish(gateway, 1, 2)
        await gateway.fleet.weights.rollback(1)
        again = PublicationState(ledger)
        await again.open()
        state = gateway.state
        assert (again.epoch, again.head, again.committed) == (
            state.epoch,
            state.head,
            state.committed,
        )
        assert (again.kept, again.pinned) == (state.kept, state.pinned)
    await ledger.close()
