"""Prepare, commit, abort over the fake backend and real versions on disk."""

from __future__ import annotations

import asyncio
import threading

import pytest

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.server import FakeBackendConfig
from headway.contracts.errors import StaleVersion, SyncError
from headway.contracts.types import LLMRequest, WeightUpdateMeta
from inference_server.backends.fake import FakeBackend
from inference_server.version_gate import VersionGate
from weight_sync.channel import StagedWeights

PATIENCE_S = 10.0


class ShelfReader:
    """A `WeightReader` over versions that a test puts on a shelf; counts and can be held up."""

    def __init__(self) -> None:
        self.torn: set[int] = set()
        self.staged: list[int] = []
        self.entered = threading.Event()
        self.may_go = threading.Event()
        self.may_go.set()
        self.inside = 0
        self.most_inside = 0

    def stage(self, meta, expected):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.entered.set()
        assert self.may_go.wait(PATIENCE_S)
        self.inside -= 1
        if meta.version in self.torn:
            raise SyncError(f"version {meta.version} is torn")
        self.staged.append(meta.version)
        return StagedWeights(meta.version, "0" * 64, {})


@pytest.fixture
def reader():
    return ShelfReader()


def make_backend(version: int = 0, latency_s: float = 0.0) -> FakeBackend:
    config = FakeBackendConfig(token_latency_s=latency_s)
    return FakeBackend(config, ModelConfig(path="unused"), version)


@pytest.fixture
def gate(reader):
    return VersionGate(make_backend(), reader)


def meta(version: int) -> WeightUpdateMeta:
    return WeightUpdateMeta(version, f"/weights/v{version}")


async def test_a_prepared_version_serves_only_after_its_commit(gate):
    await gate.prepare(meta(1))
    assert gate.version == 0
    assert await gate.commit(1) == 0
    assert gate.version == 1


async def test_prepare_and_commit_again_do_nothing(gate, reader):
    await gate.prepare(meta(1))
    await gate.prepare(meta(1))
    assert reader.staged == [1]
    await gate.commit(1)
    assert await gate.commit(1) == 0
    await gate.prepare(meta(1))
    assert reader.staged == [1]
    assert gate.version == 1


async def test_a_stale_version_is_refused_and_the_newer_one_goes_on(gate):
    await gate.prepare(meta(3))
    await gate.commit(3)
    with pytest.raises(StaleVersion, match="version 2 is older than 3"):
        await gate.prepare(meta(2))
    with pytest.raises(SyncError, match="version 2 is not prepared"):
        await gate.commit(2)
    assert gate.version == 3


async def test_a_version_that_was_not_prepared_cannot_be_committed(gate):
    with pytest.raises(SyncError, match=r"version 1 is not prepared here \(staged: None\)"):
        await gate.commit(1)
    await gate.prepare(meta(1))
    with pytest.raises(SyncError, match=r"version 2 is not prepared here \(staged: 1\)"):
        await gate.commit(2)
    assert gate.version == 0


async def test_an_aborted_version_is_forgotten_and_may_be_prepared_again(gate, reader):
    await gate.prepare(meta(1))
    await gate.abort(1)
    with pytest.raises(SyncError):
        await gate.commit(1)
    await gate.prepare(meta(1))
    await gate.commit(1)
    assert reader.staged == [1, 1]
    assert gate.version == 1


async def test_abort_of_another_version_keeps_the_staged_one(gate):
    await gate.abort(7)
    await gate.prepare(meta(2))
    await gate.abort(1)
    await gate.commit(2)
    assert gate.version == 2


async def test_a_torn_version_drops_what_was_staged_and_leaves_the_old_one_serving(gate, reader):
    await gate.prepare(meta(1))
    reader.torn.add(2)
    with pytest.raises(SyncError, match="version 2 is torn"):
        await gate.prepare(meta(2))
    with pytest.raises(SyncError, match="staged: None"):
        await gate.commit(1)
    assert gate.version == 0


async def test_two_updates_at_once_are_serial(gate, reader):
    reader.may_go.clear()
    first = asyncio.create_task(gate.prepare(meta(1)))
    assert await asyncio.to_thread(reader.entered.wait, PATIENCE_S)
    second = asyncio.create_task(gate.prepare(meta(2)))
    commit = asyncio.create_task(gate.commit(2))
    await asyncio.sleep(0)  # both have had their turn, and wait
    assert reader.inside == 1
    reader.may_go.set()
    await asyncio.wait_for(asyncio.gather(first, second, commit), PATIENCE_S)
    assert reader.staged == [1, 2]
    assert reader.most_inside == 1
    assert gate.version == 2


async def test_generation_goes_on_while_a_version_is_staged(reader):
    backend = make_backend()
    gate = VersionGate(backend, reader)
    reader.may_go.clear()
    staging = asyncio.create_task(gate.prepare(meta(1)))
    assert await asyncio.to_thread(reader.entered.wait, PATIENCE_S)
    response = await asyncio.wait_for(backend.generate(request(5)), PATIENCE_S)
    assert response.version_runs == [(0, 0, 5)]
    reader.may_go.set()
    await staging


async def test_an_update_under_running_requests_is_counted_and_shows_in_their_runs(reader):
    backend = make_backend(latency_s=0.001)
    gate = VersionGate(backend, reader)
    sampling = asyncio.Event()
    running = asyncio.create_task(backend.generate(request(60), lambda delta: sampling.set()))
    await gate.prepare(meta(1))
    await asyncio.wait_for(sampling.wait(), PATIENCE_S)
    assert gate.swap_s == 0.0
    assert await gate.commit(1) == 1
    assert gate.swap_s > 0.0
    assert gate.updates_in_flight == 1
    response = await asyncio.wait_for(running, PATIENCE_S)
    (first, second) = response.version_runs
    assert first[:2] == (0, 0)
    assert second == (1, first[2], 60)
    assert len(response.output_versions) == 60
    await gate.prepare(meta(2))
    await gate.commit(2)
    assert gate.updates_in_flight == 1


async def test_a_commit_may_name_its_own_policy(reader):
    backend = make_backend(latency_s=0.001)
    gate = VersionGate(backend, reader, "keep")
    sampling = asyncio.Event()
    running = asyncio.create_task(backend.generate(request(10_000), lambda delta: sampling.set()))
    await asyncio.wait_for(sampling.wait(), PATIENCE_S)
    await gate.prepare(meta(1))
    await gate.commit(1, "abort")
    response = await asyncio.wait_for(running, PATIENCE_S)
    assert response.stop_reason == "interrupt"


async def test_a_server_without_a_reader_takes_no_weights():
    gate = VersionGate(make_backend(), None)
    with pytest.raises(SyncError, match="set weights_root"):
        await gate.prepare(meta(1))


async def test_a_cancelled_prepare_opens_the_gate_for_the_next(gate, reader):
    reader.may_go.clear()
    first = asyncio.create_task(gate.prepare(meta(1)))
    assert await asyncio.to_thread(reader.entered.wait, PATIENCE_S)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    reader.may_go.set()
    await asyncio.wait_for(gate.prepare(meta(2)), PATIENCE_S)
    await gate.commit(2)
    assert gate.version == 2


def request(size: int) -> LLMRequest:
    return LLMRequest(rid="r", input_ids=(1, 2), gconfig=SamplingConfig(max_new_tokens=size))


def load_from(reader: ShelfReader):
    """What `VersionGate.update` calls to bring a version."""
    return lambda version: reader.stage(meta(version), {})


async def test_an_update_stages_and_commits_under_the_next_number(gate, reader):
    assert await gate.update(lambda current: current + 1, load_from(reader)) == 0
    assert (gate.version, reader.staged) == (1, [1])
    with pytest.raises(StaleVersion, match="version 1 is not newer than 1"):
        await gate.update(lambda _: 1, load_from(reader))
    reader.torn.add(2)
    with pytest.raises(SyncError, match="version 2 is torn"):
        await gate.update(lambda current: current + 1, load_from(reader))
    assert gate.version == 1


async def test_nobody_else_s_update_comes_between_the_halves_of_one(gate, reader):
    reader.may_go.clear()
    whole = asyncio.create_task(gate.update(lambda current: current + 1, load_from(reader)))
    assert await asyncio.to_thread(reader.entered.wait, PATIENCE_S)
    halves = [asyncio.create_task(gate.prepare(meta(1))), asyncio.create_task(gate.commit(1))]
    again = asyncio.create_task(gate.update(lambda current: current + 1, load_from(reader)))
    await asyncio.sleep(0)  # all have had their turn, and wait
    reader.may_go.set()
    await asyncio.wait_for(asyncio.gather(whole, *halves, again), PATIENCE_S)
    assert (gate.version, reader.staged, reader.most_inside) == (2, [1, 2], 1)


async def test_what_was_prepared_before_an_update_is_forgotten(gate, reader):
    await gate.prepare(meta(1))
    await gate.update(lambda current: current + 1, load_from(reader))
    assert reader.staged == [1, 1]
    with pytest.raises(SyncError, match=r"version 2 is not prepared here \(staged: None\)"):
        await gate.commit(2)
