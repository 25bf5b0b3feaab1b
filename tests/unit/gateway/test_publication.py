"""Publication as a transaction: who has to agree, what is durable when, and what an abort leaves."""

from __future__ import annotations

import asyncio
import time

import pytest

from gateway.ledger.sqlite import SqliteLedger
from gateway.publishing import orders
from gateway.versions.publication_state import PublicationState
from headway.contracts.errors import BackendError, Draining, StaleVersion, SyncError
from headway.contracts.http.paths import WEIGHTS_COMMIT, WEIGHTS_PREPARE
from headway.contracts.types import WeightUpdateMeta
from tests.unit.gateway.weight_server import DEADLINE_S, Gateway, WeightServer, opened_gateway
from tests.waiting import until


def meta(version: int, scheme: str = "/") -> WeightUpdateMeta:
    return WeightUpdateMeta(version, f"{scheme}v{version}")


async def on_disk(ledger: SqliteLedger) -> PublicationState:
    """What a gateway would find that starts now."""
    state = PublicationState(ledger)
    await state.open()
    return state


async def published(gateway: Gateway, *versions: int) -> None:
    for version in versions:
        assert await gateway.fleet.weights.update_weights(meta(version)) == version


def servers_of(number: int) -> list[WeightServer]:
    return [WeightServer(f"s{index}") for index in range(number)]


def num_commits(servers: list[WeightServer]) -> int:
    return sum(len(server.commits) for server in servers)


@pytest.fixture
async def ledger():
    ledger = SqliteLedger(":memory:")
    await ledger.open("gateway", 30.0)
    yield ledger
    await ledger.close()


async def test_a_version_is_staged_everywhere_recorded_and_committed():
    servers = servers_of(3)
    servers[1].running = 2
    async with opened_gateway(*servers) as gateway:
        await published(gateway, 1)
        assert [server.version for server in servers] == [1, 1, 1]
        status = gateway.fleet.weights.status()
        record = {"version": 1, "path": "/v1", "digest": "d1", "label": None}
        assert status.committed.model_dump() == record
        assert (status.head, status.publishing, gateway.fleet.updates_in_flight) == (1, None, 1)
        assert {commit.epoch for server in servers for commit in server.commits} == {status.epoch}


async def test_nothing_is_sent_before_it_is_durable(ledger: SqliteLedger):
    only = WeightServer("s0")
    seen = []

    async def note(order) -> None:
        state = await on_disk(ledger)
        seen.append((state.epoch == order.epoch, state.version))

    only.on_prepare = only.on_commit = note
    async with opened_gateway(only, ledger=ledger) as gateway:
        await published(gateway, 1)
    assert seen == [(True, 0), (True, 1)]


async def test_sequences_are_of_the_version_before_until_servers_have_swapped():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        go, told = only.holds_commit(), gateway.fleet.state.changed
        update = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: only.commits)
        assert (gateway.fleet.version, gateway.fleet.sampled_version) == (1, 0)
        swapped = told.event()
        go.set()
        async with asyncio.timeout(DEADLINE_S):
            await swapped.wait()
        assert gateway.fleet.sampled_version == 1
        await update


async def test_epochs_grow_and_a_new_ledger_s_are_above_an_older_one_s(ledger: SqliteLedger):
    only = WeightServer("s0")
    async with opened_gateway(only, ledger=ledger) as gateway:
        await published(gateway, 1, 2)
    only.version, only.digest = 0, ""
    async with opened_gateway(only) as gateway:  # the server remembers the epochs of the first
        await published(gateway, 1)
    epochs = [order.epoch for order in only.prepares]
    assert epochs == sorted(set(epochs))


async def test_a_repeat_is_answered_without_work_and_older_versions_are_refused():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        await published(gateway, 1, 2, 2)
        assert len(only.prepares) == 2
        with pytest.raises(StaleVersion, match="version 2 is not newer than 2"):
            await gateway.fleet.weights.update_weights(WeightUpdateMeta(2, "/elsewhere"))


async def test_two_publishers_take_turns():
    only = WeightServer("s0")
    go = only.holds_prepare()
    async with opened_gateway(only) as gateway:
        first = asyncio.create_task(gateway.fleet.weights.update_weights(meta(2)))
        await until(lambda: only.prepares)
        others = [
            asyncio.create_task(gateway.fleet.weights.update_weights(meta(n))) for n in (1, 3)
        ]
        await asyncio.sleep(0)
        assert gateway.fleet.weights.status().publishing == 2
        go.set()
        assert await first == 2
        with pytest.raises(StaleVersion):
            await others[0]
        assert await others[1] == 3


async def test_the_majority_s_digest_counts_and_the_others_catch_up():
    servers = servers_of(3)
    servers[2].digests[1] = "torn"
    async with opened_gateway(*servers) as gateway:
        await published(gateway, 1)
        assert gateway.states() == {"s0": "ready", "s1": "ready", "s2": "fenced"}
        assert (servers[2].version, servers[2].staged) == (0, None)
        del servers[2].digests[1]
        await gateway.until_ready()
        assert servers[2].version == 1
        assert servers[2].prepares[-1].digest == "d1"


async def test_a_tie_of_digests_is_no_version():
    servers = servers_of(2)
    servers[1].digests[1] = "torn"
    async with opened_gateway(*servers) as gateway:
        with pytest.raises(SyncError, match="2 of 2 ready servers staged it in 2 different forms"):
            await gateway.fleet.weights.update_weights(meta(1))
        assert [server.staged for server in servers] == [None, None]
        assert gateway.states() == {"s0": "ready", "s1": "ready"}


async def test_servers_that_cannot_know_a_digest_agree():
    servers = servers_of(3)
    servers[0].digests[1] = servers[1].digests[1] = ""
    async with opened_gateway(*servers) as gateway:
        await published(gateway, 1)
        assert gateway.fleet.weights.status().committed.digest == "d1"
        assert gateway.states() == {"s0": "ready", "s1": "ready", "s2": "ready"}


async def test_without_quorum_the_old_version_serves_and_the_number_may_be_tried_again():
    servers = servers_of(3)
    servers[0].refusal = servers[1].refusal = SyncError("no space left")
    async with opened_gateway(*servers) as gateway:
        with pytest.raises(
            SyncError, match=r"version 1 was not committed, 0 goes on serving.*s1: no space left"
        ):
            await gateway.fleet.weights.update_weights(meta(1))
        assert [server.version for server in servers] == [0, 0, 0]
        assert set(gateway.states().values()) == {"ready"}
        assert (gateway.fleet.head, gateway.fleet.version) == (0, 0)
        servers[0].refusal = None
        await published(gateway, 1)
        assert gateway.states()["s1"] == "fenced"


async def test_a_version_that_every_server_refuses_is_not_committed():
    servers = servers_of(2)
    for server in servers:
        server.refusal = SyncError("torn")
    async with opened_gateway(*servers) as gateway:
        with pytest.raises(SyncError, match="s0: torn; s1: torn"):
            await gateway.fleet.weights.update_weights(meta(1))


async def test_a_lost_quorum_ends_the_others_at_once():
    servers = servers_of(3)
    servers[0].refusal = SyncError("torn")
    servers[1].holds_prepare()
    servers[2].holds_prepare()
    async with opened_gateway(*servers, quorum=1.0) as gateway:
        with pytest.raises(SyncError, match="0 of 3 ready servers staged it, 3 that agree"):
            await gateway.fleet.weights.update_weights(meta(1))
        assert [len(server.aborts) for server in servers] == [1, 1, 1]


async def test_a_server_that_is_too_slow_is_fenced():
    servers = servers_of(2)
    servers[1].holds_prepare()
    async with opened_gateway(*servers, update_timeout_s=0.3) as gateway:
        await published(gateway, 1)
        assert gateway.states() == {"s0": "ready", "s1": "fenced"}
        assert [abort.version for abort in servers[1].aborts] == [1]


async def test_once_a_quorum_has_staged_a_version_the_others_are_not_waited_for_long():
    servers = servers_of(3)
    servers[2].holds_prepare()
    async with opened_gateway(*servers, quorum=0.6, straggler_s=0.05) as gateway:
        async with asyncio.timeout(DEADLINE_S):
            await published(gateway, 1)
        assert gateway.states() == {"s0": "ready", "s1": "ready", "s2": "fenced"}
        await until(lambda: [abort.version for abort in servers[2].aborts] == [1])


async def test_a_straggler_that_does_not_answer_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(orders, "ABORT_TIMEOUT_S", 10 * DEADLINE_S)
    servers = servers_of(3)
    servers[2].holds_prepare()
    servers[2].answers_aborts = False
    async with opened_gateway(*servers, quorum=0.6, straggler_s=0.05) as gateway:
        async with asyncio.timeout(DEADLINE_S):
            await published(gateway, 1)
        assert gateway.states() == {"s0": "ready", "s1": "ready", "s2": "fenced"}


async def test_servers_that_are_slow_but_there_prove_nothing():
    only = WeightServer("s0")
    only.holds_prepare()
    async with opened_gateway(only, update_timeout_s=0.3) as gateway:
        with pytest.raises(SyncError, match="version 1 was not committed"):
            await gateway.fleet.weights.update_weights(meta(1))


async def test_a_server_whose_lease_ends_is_not_waited_for():
    servers = servers_of(2)
    servers[1].holds_prepare()
    async with opened_gateway(*servers, lease_s=0.2) as gateway:
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        while not publication.done():
            gateway.fleet.report(servers[0].report())
            await asyncio.wait({publication}, timeout=0.02)
        assert await publication == 1
        assert gateway.states() == {"s0": "ready", "s1": "lost"}


async def test_with_no_server_a_stored_version_is_recorded_and_proven_by_the_first_who_comes():
    late = WeightServer("late")
    async with opened_gateway() as gateway:
        await published(gateway, 1)
        assert gateway.fleet.weights.status().committed.digest is None
        await late.start()
        gateway.servers.append(late)
        await gateway.until_ready()
        assert (late.version, gateway.fleet.weights.status().committed.digest) == (1, "d1")
        await late.stop()


async def test_what_nobody_has_proven_is_retracted_when_its_publisher_gives_up():
    async with opened_gateway() as gateway:
        await published(gateway, 1)
        await gateway.fleet.weights.cancel_update(1)
        assert (gateway.fleet.version, gateway.fleet.head) == (0, 0)
        only = WeightServer("s0")
        await only.start()
        gateway.servers.append(only)
        await gateway.until_ready()
        await published(gateway, 1)
        await gateway.fleet.weights.cancel_update(1)
        assert gateway.fleet.version == 1  # proven: too late
        await only.stop()


async def test_with_no_server_a_version_that_streams_is_lost_in_the_end():
    async with opened_gateway(update_timeout_s=0.1) as gateway:
        with pytest.raises(SyncError, match="0 of 0 ready servers"):
            await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/"))
        assert gateway.fleet.weights.status().kept == []


@pytest.mark.parametrize("scheme", ["/", "gloo://trainer:1/"])
async def test_servers_that_all_die_leave_only_what_is_stored(scheme: str):
    servers = servers_of(2)
    for server in servers:
        server.holds_prepare()
    async with opened_gateway(*servers, update_timeout_s=1.0) as gateway:
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1, scheme)))
        await until(lambda: all(server.prepares for server in servers))
        for server in servers:
            await server.stop()
        if scheme == "/":
            assert await publication == 1
        else:
            with pytest.raises(SyncError, match="version 1 was not committed"):
                await publication
        assert set(gateway.states().values()) <= {"lost", "ready"}


async def test_simultaneous_commits_do_not_wait_for_one_another():
    servers = servers_of(2)
    goes = [server.holds_commit() for server in servers]
    async with opened_gateway(*servers) as gateway:
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: all(server.commits for server in servers))
        for go in goes:
            go.set()
        assert await publication == 1


async def test_rolling_commits_come_one_after_the_other():
    servers = servers_of(3)
    goes = [server.holds_commit() for server in servers]
    async with opened_gateway(*servers, commit_order="rolling") as gateway:
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        for number in range(3):
            await until(lambda number=number: num_commits(servers) > number)
            assert num_commits(servers) == number + 1
            asked = next(
                i for i, server in enumerate(servers) if server.commits and not server.version
            )
            goes[asked].set()
        assert await publication == 1


async def test_a_commit_that_fails_or_hangs_is_caught_up():
    servers = servers_of(3)
    servers[0].commit_failure = BackendError("out of memory")
    go = servers[1].holds_commit()
    async with opened_gateway(*servers, commit_timeout_s=0.3) as gateway:
        await published(gateway, 1)
        assert gateway.states() == {"s0": "fenced", "s1": "fenced", "s2": "ready"}
        go.set()
        await gateway.until_ready()
        assert [server.version for server in servers] == [1, 1, 1]


async def test_a_cancelled_publication_is_aborted_and_may_be_repeated():
    servers = servers_of(2)
    servers[0].holds_prepare()
    async with opened_gateway(*servers) as gateway:
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: servers[0].prepares and servers[1].staged)
        publication.cancel()
        with pytest.raises(asyncio.CancelledError):
            await publication
        assert [len(server.aborts) for server in servers] == [1, 1]
        assert servers[1].staged is None
        servers[0].on_prepare = None
        await published(gateway, 1)


async def test_a_publication_is_not_cancelled_after_its_commit_point():
    only = WeightServer("s0")
    go = only.holds_commit()
    async with opened_gateway(only) as gateway:
        publication = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: only.commits)
        publication.cancel()
        await asyncio.sleep(0)
        go.set()
        assert await publication == 1
        assert (only.version, only.aborts) == (1, [])


async def test_members_of_a_process_group_get_seats_behind_the_trainer():
    servers = [WeightServer("s0", num_ranks=2), WeightServer("s1"), WeightServer("s2", num_ranks=4)]
    async with opened_gateway(*servers) as gateway:
        await gateway.fleet.weights.update_weights(meta(1, "nccl://trainer:1/"))
        seats = [server.prepares[0].group_rank for server in servers]
        assert [(group_rank.rank, group_rank.world_size) for group_rank in seats] == [
            (1, 8),
            (3, 8),
            (4, 8),
        ]


async def test_a_group_begins_anew_without_a_member_that_failed():
    servers = servers_of(3)
    servers[1].refusal = SyncError("cut off")
    for server in (servers[0], servers[2]):
        server.waits_for_others_in_a_group_of(4)
    async with opened_gateway(*servers) as gateway:
        assert await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/")) == 1
        first, second = servers[2].prepares
        assert (first.group_rank.rank, first.group_rank.world_size) == (3, 4)
        assert (second.group_rank.rank, second.group_rank.world_size) == (2, 3)
        assert second.epoch > first.epoch
        assert [abort.epoch for abort in servers[0].aborts] == [first.epoch]
        assert gateway.states() == {"s0": "ready", "s1": "fenced", "s2": "ready"}


async def test_who_only_says_that_another_left_the_group_is_asked_again():
    servers = servers_of(3)
    for server in (servers[0], servers[2]):
        server.waits_for_others_in_a_group_of(4)
    async with opened_gateway(*servers) as gateway:

        async def hears_of_it(order) -> None:
            if order.group_rank.world_size == 4:
                gateway.fleet.report(servers[0].report(draining=True))
                raise SyncError("rank 1 left")

        servers[1].on_prepare = hears_of_it
        assert await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/")) == 1
        assert [len(server.prepares) for server in servers] == [1, 2, 2]
        assert (servers[1].version, servers[2].version) == (1, 1)


async def test_who_hears_of_it_before_the_gateway_does_is_asked_again():
    servers = servers_of(3)
    servers[0].waits_for_others_in_a_group_of(4)
    wait = servers[0].on_prepare

    async def leaves(order) -> None:
        await wait(order)
        raise Draining("this server shuts down")

    async def hears_of_it(order) -> None:
        if order.group_rank.world_size == 4:
            raise SyncError("rank 1 left")

    servers[0].on_prepare, servers[1].on_prepare = leaves, hears_of_it
    async with opened_gateway(*servers) as gateway:
        assert await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/")) == 1
        asked = [[order.group_rank.world_size for order in one.prepares] for one in servers]
        assert asked == [[4, 3], [4, 3], [4, 3, 3]]
        assert (servers[1].version, servers[2].version) == (1, 1)


async def test_the_only_server_may_leave_before_the_gateway_hears_of_it():
    """As with none ready: who comes later catches up."""
    leaving, later = servers_of(2)
    leaving.refusal = Draining("this server shuts down")
    async with opened_gateway(leaving) as gateway:
        await published(gateway, 1)
        assert (gateway.fleet.version, leaving.version) == (1, 0)
        await later.start()
        gateway.servers = [later]
        await until(lambda: gateway.heartbeat() or later.version == 1)
        await later.stop()


async def test_a_group_is_given_up_when_too_few_survive():
    servers = servers_of(3)
    for server in servers:
        server.refusal = SyncError("cut off")
    async with opened_gateway(*servers) as gateway:
        with pytest.raises(SyncError, match="s0: cut off"):
            await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/"))
        assert set(gateway.states().values()) == {"ready"}


async def test_a_server_that_obeys_a_newer_epoch_is_won_back_by_the_gateway_it_reports_to():
    servers = servers_of(3)
    async with opened_gateway(*servers) as gateway:
        await published(gateway, 1)
        servers[2].epoch = int(time.time() * 1000) + 1000  # a gateway's whose clock is ahead
        await published(gateway, 2)
        assert gateway.states()["s2"] == "fenced"
        await gateway.until_ready()
        assert servers[2].version == 2


@pytest.mark.parametrize("state", ["preparing", "staged"])
async def test_a_gateway_killed_before_the_record_comes_back_with_the_old_version(
    ledger: SqliteLedger, state: str
):
    servers = servers_of(2)
    servers[0].holds_prepare()
    if state == "preparing":
        servers[1].holds_prepare()
    async with opened_gateway(*servers, ledger=ledger) as gateway:
        dead = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: all(server.prepares for server in servers))
        async with opened_gateway(*servers, ledger=ledger) as successor:
            assert (successor.fleet.version, successor.fleet.head) == (0, 0)
            assert set(successor.states().values()) == {"ready"}
            for server in servers:
                server.on_prepare = None
            await published(successor, 1)
            assert servers[0].prepares[1].epoch > servers[0].prepares[0].epoch
            assert [server.version for server in servers] == [1, 1]
        dead.cancel()
        await asyncio.gather(dead, return_exceptions=True)


async def test_a_gateway_killed_after_the_record_brings_everybody_to_the_new_version(
    ledger: SqliteLedger,
):
    servers = servers_of(2)
    go = servers[1].holds_commit()
    async with opened_gateway(*servers, ledger=ledger) as gateway:
        dead = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: servers[0].version == 1 and servers[1].commits)
        servers[1].on_commit = None
        async with opened_gateway(*servers, ledger=ledger) as successor:
            assert (successor.fleet.version, successor.states()["s0"]) == (1, "ready")
            assert successor.states()["s1"] == "joining"
            await published(successor, 1)  # the publisher's repeat
            await successor.until_ready()
            assert servers[1].version == 1
        go.set()
        await dead


async def test_what_a_dead_gateway_still_sends_is_fenced(ledger: SqliteLedger):
    only = WeightServer("s0")
    go = only.holds_prepare()
    async with opened_gateway(only, ledger=ledger) as gateway:
        old = asyncio.create_task(gateway.fleet.weights.update_weights(meta(1)))
        await until(lambda: only.prepares)
        only.on_prepare = None
        async with opened_gateway(only, ledger=ledger) as successor:
            await published(successor, 2)
            go.set()
            await asyncio.wait({old})
            assert only.version == 2


async def test_a_gateway_that_came_back_waits_for_the_servers_it_had(ledger: SqliteLedger):
    servers = servers_of(2)
    async with opened_gateway(*servers, ledger=ledger) as gateway:
        await published(gateway, 1)
        async with opened_gateway(ledger=ledger) as successor:
            streamed = meta(2, "gloo://trainer:1/")
            publication = asyncio.create_task(successor.fleet.weights.update_weights(streamed))
            for server in servers:
                await asyncio.sleep(0)
                assert len(server.prepares) == 1
                successor.fleet.report(server.report())
            assert await publication == 2
            assert [server.version for server in servers] == [2, 2]


async def test_a_gateway_does_not_wait_longer_than_the_leases_last(ledger: SqliteLedger):
    only = WeightServer("s0")
    async with opened_gateway(only, ledger=ledger) as gateway:
        await published(gateway, 1)
        async with opened_gateway(ledger=ledger, lease_s=0.1) as successor:
            await published(successor, 2)
            assert successor.fleet.weights.status().committed.digest is None


async def test_a_group_takes_in_servers_that_nobody_could_bring_to_the_version_before():
    only = WeightServer("s0")
    async with opened_gateway(only) as gateway:
        assert await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/")) == 1
        only.version, only.digest, only.staged, only.uptime_s = 0, "", None, 0.5
        gateway.heartbeat()
        await until(lambda: gateway.states() == {"s0": "fenced"})
        go = only.holds_prepare()
        publication = asyncio.create_task(
            gateway.fleet.weights.update_weights(meta(2, "gloo://trainer:1/"))
        )
        await until(lambda: only.prepares[-1].version == 2)
        gateway.heartbeat()  # it is not caught up beside the publication
        go.set()
        assert await publication == 2
        assert (gateway.states(), only.version) == ({"s0": "ready"}, 2)


async def test_a_version_that_streams_waits_for_a_server_that_is_started_again():
    dead, successor = servers_of(2)
    async with opened_gateway(dead) as gateway:
        assert await gateway.fleet.weights.update_weights(meta(1, "gloo://trainer:1/")) == 1
        await dead.stop()  # the gateway has not noticed
        publication = asyncio.create_task(
            gateway.fleet.weights.update_weights(meta(2, "gloo://trainer:1/"))
        )
        await until(lambda: gateway.states() == {"s0": "lost"})
        await successor.start()
        gateway.fleet.report(successor.report())
        assert await publication == 2
        assert (gateway.states()["s1"], successor.version) == ("ready", 2)
        await successor.stop()


@pytest.mark.parametrize("path", [WEIGHTS_PREPARE, WEIGHTS_COMMIT])
async def test_an_answer_that_makes_no_sense_is_a_failure_of_that_server(path: str):
    servers = servers_of(2)
    servers[1].garbled = path
    async with opened_gateway(*servers) as gateway:
        await published(gateway, 1)
        assert gateway.states() == {"s0": "ready", "s1": "fenced"}
