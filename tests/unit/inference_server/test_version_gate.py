"""Prepare, commit, abort over the fake backend: epochs, deadlines, and gateways that die."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.errors import Draining, Fenced, StaleVersion, SyncError
from headway.contracts.http.weights import (
    GroupRankBody,
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
)
from headway.contracts.types import LLMRequest
from inference_server.backends.base import HeldVersion
from inference_server.backends.fake import FakeBackend
from inference_server.version_gate import VersionGate
from tests.unit.inference_server.peer_receiver import DEADLINE_S, PeerReceiver, make_staged
from tests.waiting import until


def make_backend(version: int = 0, latency_s: float = 0.0) -> FakeBackend:
    config = FakeBackendConfig(token_latency_s=latency_s)
    return FakeBackend(config, ModelConfig(path="unused"), version)


@pytest.fixture
def peer_store() -> PeerReceiver:
    return PeerReceiver()


@pytest.fixture
async def gate(peer_store) -> AsyncIterator[VersionGate]:
    gate = VersionGate(make_backend(), peer_store)
    yield gate
    await asyncio.wait_for(gate.aclose(), DEADLINE_S)
    assert peer_store.inside == 0
    assert peer_store.is_closed


def order(epoch: int, version: int, **fields) -> WeightPrepareRequest:
    given = {"path": f"/weights/v{version}", "timeout_s": 60.0} | fields
    return WeightPrepareRequest(epoch=epoch, version=version, **given)


def commit(epoch: int, version: int, policy=None) -> WeightCommitRequest:
    return WeightCommitRequest(epoch=epoch, version=version, policy=policy)


def abort(epoch: int, version: int) -> WeightAbortRequest:
    return WeightAbortRequest(epoch=epoch, version=version)


def digest_of(version: int) -> str:
    return make_staged(version).digest


def request(size: int) -> LLMRequest:
    return LLMRequest(rid="r", input_ids=(1, 2), gconfig=SamplingConfig(max_new_tokens=size))


async def publish(gate: VersionGate, epoch: int, version: int, policy=None):
    await gate.prepare(order(epoch, version))
    return await gate.commit(commit(epoch, version, policy))


async def held_up(gate: VersionGate, peer_store: PeerReceiver, wanted: WeightPrepareRequest):
    """A prepare whose reader waits."""
    peer_store.may_go.clear()
    peer_store.entered.clear()
    preparing = asyncio.create_task(gate.prepare(wanted))
    assert await asyncio.to_thread(peer_store.entered.wait, DEADLINE_S)
    return preparing


# One publication.


async def test_a_prepared_version_serves_only_after_its_commit(gate, peer_store):
    assert await gate.prepare(order(1, 1)) == digest_of(1)
    assert (gate.version, gate.digest) == (0, "")
    answer = await gate.commit(commit(1, 1))
    assert (answer.version, answer.running, answer.digest) == (1, 0, digest_of(1))
    assert (gate.version, gate.digest, gate.epoch) == (1, digest_of(1), 1)
    assert [kept.version for kept in peer_store.kept] == [1]


async def test_what_is_sent_again_is_answered_without_work(gate, peer_store):
    for _ in range(2):
        assert await gate.prepare(order(1, 1)) == digest_of(1)
    first = await gate.commit(commit(1, 1))
    assert await gate.commit(commit(1, 1)) == first
    assert await gate.prepare(order(1, 1)) == digest_of(1)
    assert await gate.commit(commit(1, 1)) == first
    assert (peer_store.staged, gate.served.updates) == ([1], 1)


async def test_a_version_that_was_not_prepared_cannot_be_committed(gate):
    with pytest.raises(SyncError, match=r"version 1 is not prepared here \(staged: None\)"):
        await gate.commit(commit(1, 1))
    await gate.prepare(order(1, 1))
    with pytest.raises(SyncError, match=r"version 2 is not prepared here \(staged: 1\)"):
        await gate.commit(commit(1, 2))
    with pytest.raises(SyncError, match="not prepared"):
        await gate.commit(commit(2, 1))  # staged for another publication
    assert gate.version == 0


async def test_a_commit_does_not_wait_for_what_is_still_read(gate, peer_store):
    preparing = await held_up(gate, peer_store, order(1, 1))
    with pytest.raises(SyncError, match="still being staged"):
        await gate.commit(commit(1, 1))
    peer_store.may_go.set()
    await preparing
    assert (await gate.commit(commit(1, 1))).version == 1


async def test_a_rollback_is_a_publication_like_any_other(gate, peer_store):
    for epoch, version in enumerate((5, 3, 6), start=1):
        answer = await publish(gate, epoch, version)
        assert (answer.version, gate.version, gate.digest) == (version, version, digest_of(version))
    assert peer_store.staged == [5, 3, 6]


async def test_what_was_replaced_is_freed_at_once(gate, peer_store):
    gc.disable()  # a cycle would keep its memory, and the blobs that it is mapped from
    try:
        await gate.prepare(order(1, 1))
        tensor = weakref.ref(gate._state.staging._staged.held.tensors["w"])
        await gate.commit(commit(1, 1))
        await publish(gate, 2, 2)
        await until(lambda: tensor() is None)
    finally:
        gc.enable()


async def test_a_torn_version_leaves_the_old_one_serving_and_may_be_tried_again(gate, peer_store):
    peer_store.torn.add(1)
    with pytest.raises(SyncError, match="version 1 is torn"):
        await gate.prepare(order(1, 1))
    with pytest.raises(SyncError, match="staged: None"):
        await gate.commit(commit(1, 1))
    assert gate.version == 0
    peer_store.torn.clear()
    assert (await publish(gate, 1, 1)).version == 1


async def test_a_version_with_another_digest_is_dropped(gate):
    with pytest.raises(SyncError, match=r"has the digest .* it was dropped"):
        await gate.prepare(order(1, 1, digest="f" * 64))
    with pytest.raises(SyncError, match="not prepared"):
        await gate.commit(commit(1, 1))
    assert await gate.prepare(order(1, 1, digest=digest_of(1))) == digest_of(1)


async def test_a_number_alone_is_no_proof(peer_store):
    gate = VersionGate(make_backend(version=1), peer_store)
    assert await gate.prepare(order(1, 1)) == digest_of(1)
    assert gate.digest == ""
    assert (await gate.commit(commit(1, 1))).digest == gate.digest == digest_of(1)
    assert await gate.prepare(order(2, 1)) == digest_of(1)
    assert await gate.prepare(order(3, 1, digest=digest_of(1), path="/peer")) == digest_of(1)
    assert peer_store.staged == [1]
    assert await gate.prepare(order(4, 1, path="/elsewhere")) == digest_of(1)
    assert peer_store.staged == [1, 1]
    await gate.aclose()


async def test_what_is_staged_is_not_taken_for_what_lies_elsewhere(gate, peer_store):
    await gate.prepare(order(1, 1))
    assert await gate.prepare(order(2, 1, digest=digest_of(1), path="/peer")) == digest_of(1)
    assert peer_store.paths == ["/weights/v1"]
    await gate.prepare(order(3, 1, path="/elsewhere"))
    assert peer_store.paths == ["/weights/v1", "/elsewhere"]


async def test_an_aborted_version_is_forgotten(gate, peer_store):
    await gate.prepare(order(1, 1))
    gate.abort(abort(1, 7))  # another one
    gate.abort(abort(1, 1))
    with pytest.raises(SyncError, match="version 1 was aborted"):
        await gate.commit(commit(1, 1))
    await publish(gate, 2, 1)
    assert peer_store.staged == [1, 1]


async def test_an_abort_ends_a_staging_at_once(gate, peer_store):
    preparing = await held_up(gate, peer_store, order(1, 1))
    gate.abort(abort(1, 1))
    with pytest.raises(SyncError, match="version 1 was aborted"):
        await asyncio.wait_for(preparing, DEADLINE_S)
    assert (gate.version, peer_store.staged) == (0, [])


# Deadlines, and gateways that go away.


async def test_what_is_staged_is_dropped_when_no_commit_comes(gate):
    await gate.prepare(order(1, 1, timeout_s=0.05))
    tensor = weakref.ref(gate._state.staging._staged.held.tensors["w"])
    await until(lambda: gc.collect() >= 0 and tensor() is None)
    with pytest.raises(SyncError, match="was not committed within"):
        await gate.commit(commit(1, 1))
    assert (await publish(gate, 1, 1)).version == 1


async def test_a_staging_ends_at_its_deadline(gate, peer_store):
    preparing = await held_up(gate, peer_store, order(1, 1, timeout_s=0.05))
    with pytest.raises(SyncError, match=r"version 1 was not staged within 0.05 s"):
        await asyncio.wait_for(preparing, DEADLINE_S)


async def test_a_publisher_without_progress_is_given_up(peer_store):
    gate = VersionGate(make_backend(), peer_store, stage_timeout_s=0.05)
    preparing = await held_up(gate, peer_store, order(1, 1))
    with pytest.raises(SyncError, match="made no progress"):
        await asyncio.wait_for(preparing, DEADLINE_S)
    await gate.aclose()


async def test_a_gateway_that_comes_back_finds_its_staging(gate, peer_store):
    dead = await held_up(gate, peer_store, order(1, 1))
    dead.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dead
    again = asyncio.create_task(gate.prepare(order(2, 1, digest=digest_of(1))))
    await asyncio.sleep(0)
    peer_store.may_go.set()
    assert await asyncio.wait_for(again, DEADLINE_S) == digest_of(1)
    assert await gate.prepare(order(3, 1)) == digest_of(1)  # and what is staged
    assert (await gate.commit(commit(3, 1))).version == 1
    assert (peer_store.staged, peer_store.most_inside) == ([1], 1)


async def test_who_takes_over_says_what_it_must_be(gate, peer_store):
    first = await held_up(gate, peer_store, order(1, 1))
    second = asyncio.create_task(gate.prepare(order(2, 1, digest="f" * 64)))
    await asyncio.sleep(0)
    peer_store.may_go.set()
    for preparing in (first, second):
        with pytest.raises(SyncError, match="has the digest"):
            await asyncio.wait_for(preparing, DEADLINE_S)
    await gate.prepare(order(3, 1))
    with pytest.raises(SyncError, match="has the digest"):  # staged, and not what is wanted
        await gate.prepare(order(4, 1, digest="f" * 64))
    assert peer_store.staged == [1, 1, 1]


async def test_a_swap_goes_on_when_the_connection_of_its_commit_is_lost(peer_store):
    backend = make_backend(latency_s=0.001)
    gate = VersionGate(backend, peer_store, "drain")
    sampling = asyncio.Event()
    running = asyncio.create_task(backend.generate(request(100), lambda delta: sampling.set()))
    await asyncio.wait_for(sampling.wait(), DEADLINE_S)
    await gate.prepare(order(1, 1, timeout_s=0.05))
    dead = asyncio.create_task(gate.commit(commit(1, 1)))
    await until(lambda: not backend._admitting.is_set())
    dead.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dead
    gate.abort(abort(1, 1))  # too late
    assert await gate.prepare(order(2, 1)) == digest_of(1)
    again, late = (asyncio.create_task(gate.commit(commit(2, 1))) for _ in range(2))
    response = await asyncio.wait_for(running, DEADLINE_S)
    assert response.version_runs == [(0, 0, 100)]
    answers = await asyncio.wait_for(asyncio.gather(again, late), DEADLINE_S)
    assert [answer.version for answer in answers] == [1, 1]
    assert answers[0] == answers[1] == await gate.commit(commit(2, 1))
    assert gate.served.updates == 1
    await gate.aclose()


async def test_a_refused_swap_leaves_the_version_staged(gate, peer_store, monkeypatch):
    await gate.prepare(order(1, 1))
    swap = FakeBackend.swap

    async def refuse(self, staged, policy="keep"):
        raise SyncError("the engine refused")

    monkeypatch.setattr(FakeBackend, "swap", refuse)
    with pytest.raises(SyncError, match="the engine refused"):
        await gate.commit(commit(1, 1))
    monkeypatch.setattr(FakeBackend, "swap", swap)
    assert (await gate.commit(commit(1, 1))).version == 1
    assert peer_store.staged == [1]


# Epochs.


async def test_an_older_epoch_is_fenced_everywhere(gate):
    await publish(gate, 7, 2)
    for call in (gate.prepare(order(6, 3)), gate.commit(commit(6, 2))):
        with pytest.raises(Fenced, match="epoch 6 is over: this server has heard of epoch 7"):
            await call
    with pytest.raises(Fenced, match=r"epoch 0 .* epoch 7"):
        gate.abort(abort(0, 2))
    assert (gate.version, gate.epoch) == (2, 7)


@pytest.mark.parametrize("version", [1, 2])
async def test_a_newer_epoch_ends_the_staging_of_an_older_one(gate, peer_store, version):
    old = await held_up(gate, peer_store, order(1, 1))
    new = asyncio.create_task(gate.prepare(order(2, version, path="/elsewhere")))
    with pytest.raises(SyncError, match=f"epoch 2 came with version {version}"):
        await asyncio.wait_for(old, DEADLINE_S)
    peer_store.may_go.set()
    assert await asyncio.wait_for(new, DEADLINE_S) == digest_of(version)
    assert (peer_store.paths, peer_store.most_inside) == (["/elsewhere"], 1)
    with pytest.raises(Fenced):
        await gate.commit(commit(1, 1))
    assert (await gate.commit(commit(2, version))).version == version


async def test_a_newer_epoch_that_wants_what_serves_ends_a_staging_too(gate, peer_store):
    await publish(gate, 1, 1)
    old = await held_up(gate, peer_store, order(2, 2))
    assert await gate.prepare(order(3, 1, digest=digest_of(1))) == digest_of(1)
    with pytest.raises(SyncError, match="epoch 3 came"):
        await asyncio.wait_for(old, DEADLINE_S)
    assert (await gate.commit(commit(3, 1))).version == 1
    assert gate.served.updates == 1


async def test_only_one_version_is_read_at_a_time_however_many_ask(gate, peer_store):
    peer_store.may_go.clear()
    asked = [asyncio.create_task(gate.prepare(order(e, e))) for e in range(1, 6)]
    assert await asyncio.to_thread(peer_store.entered.wait, DEADLINE_S)
    ended, _ = await asyncio.wait(asked[:4], timeout=DEADLINE_S)
    assert all(isinstance(task.exception(), SyncError) for task in ended)
    assert len(ended) == 4
    peer_store.may_go.set()
    assert await asyncio.wait_for(asked[4], DEADLINE_S) == digest_of(5)
    assert (peer_store.staged, peer_store.most_inside) == ([5], 1)


async def test_a_seat_in_a_group_is_taken_anew_in_each_epoch(gate, peer_store):
    group_rank = GroupRankBody(rank=1, world_size=2)
    first = await held_up(gate, peer_store, order(1, 1, group_rank=group_rank))
    same = asyncio.create_task(gate.prepare(order(1, 1, group_rank=group_rank)))
    await asyncio.sleep(0)
    other = asyncio.create_task(gate.prepare(order(2, 1, group_rank=group_rank)))
    for preparing in (first, same):
        with pytest.raises(SyncError, match="epoch 2 came"):
            await asyncio.wait_for(preparing, DEADLINE_S)
    peer_store.may_go.set()
    assert await asyncio.wait_for(other, DEADLINE_S) == digest_of(1)


async def test_what_flowed_is_found_by_its_digest_when_it_lies_nowhere(gate, peer_store):
    await gate.prepare(order(1, 1, group_rank=GroupRankBody(rank=1, world_size=2)))
    assert await gate.prepare(order(1, 1, digest=digest_of(1))) == digest_of(1)
    assert (await gate.commit(commit(1, 1))).version == 1
    assert peer_store.staged == [1]


# Under running requests.


async def test_generation_goes_on_while_a_version_is_staged(gate, peer_store):
    staging = await held_up(gate, peer_store, order(1, 1))
    response = await asyncio.wait_for(gate._backend.generate(request(5)), DEADLINE_S)
    assert response.version_runs == [(0, 0, 5)]
    peer_store.may_go.set()
    await staging


async def test_each_token_bears_the_version_that_sampled_it_backwards_too(peer_store):
    backend = make_backend(latency_s=0.001)
    gate = VersionGate(backend, peer_store)
    heard: list[int] = []
    running = asyncio.create_task(
        backend.generate(request(200), lambda delta: heard.append(delta.version))
    )
    for epoch, version in enumerate((5, 3, 6), start=1):
        count = len(heard)
        await until(lambda count=count: len(heard) > count + 5)
        assert (await publish(gate, epoch, version)).running == 1
    response = await asyncio.wait_for(running, DEADLINE_S)
    assert response.output_versions == heard
    assert [version for version, _, _ in response.version_runs] == [0, 5, 3, 6]
    assert (gate.served.updates, gate.served.updates_in_flight) == (3, 3)
    assert gate.served.swap_s > 0.0
    await gate.aclose()


async def test_a_commit_may_name_its_own_policy(peer_store):
    backend = make_backend(latency_s=0.001)
    gate = VersionGate(backend, peer_store, "keep")
    sampling = asyncio.Event()
    running = asyncio.create_task(backend.generate(request(10_000), lambda delta: sampling.set()))
    await asyncio.wait_for(sampling.wait(), DEADLINE_S)
    await publish(gate, 1, 1, "abort")
    response = await asyncio.wait_for(running, DEADLINE_S)
    assert response.stop_reason == "interrupt"
    await gate.aclose()


# Shutdown.


async def test_a_drain_ends_a_staging_and_takes_nothing_new(gate, peer_store):
    preparing = await held_up(gate, peer_store, order(1, 1))
    gate.drain()
    with pytest.raises(Draining, match="shuts down: it stages nothing any more"):
        await asyncio.wait_for(preparing, DEADLINE_S)
    with pytest.raises(Draining):
        await gate.prepare(order(2, 1))
    assert peer_store.staged == []


# Updates in one turn.


def load(version: int) -> HeldVersion:
    return HeldVersion(make_staged(version))


async def test_an_update_stages_and_commits_under_the_next_number(gate, peer_store):
    assert await gate.update(lambda current: current + 1, load) == 0
    assert (gate.version, gate.digest) == (1, digest_of(1))
    assert [kept.version for kept in peer_store.kept] == [1]
    with pytest.raises(StaleVersion, match="version 1 is not newer than 1"):
        await gate.update(lambda _: 1, load)

    def fail(version):
        raise SyncError(f"version {version} is torn")

    with pytest.raises(SyncError, match="version 2 is torn"):
        await gate.update(lambda current: current + 1, fail)
    assert gate.version == 1


async def test_an_update_and_a_publication_take_turns(gate, peer_store):
    staging = await held_up(gate, peer_store, order(1, 7))
    update = asyncio.create_task(gate.update(lambda current: current + 1, load))
    await asyncio.sleep(0)
    assert gate.version == 0
    peer_store.may_go.set()
    await asyncio.wait_for(asyncio.gather(staging, update), DEADLINE_S)
    assert gate.version == 1
    with pytest.raises(SyncError, match=r"version 7 is not prepared here \(staged: None\)"):
        await gate.commit(commit(1, 7))


async def test_a_publication_is_not_taken_for_an_update_of_its_number(gate, peer_store):
    await gate.prepare(order(1, 1))
    await gate.update(lambda current: current + 1, load)
    with pytest.raises(SyncError, match=r"version 1 is not prepared here \(staged: None\)"):
        await gate.commit(commit(1, 1))
