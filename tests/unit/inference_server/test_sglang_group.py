"""Versions into the live weights of an SGLang engine: the real trainer's end, rendezvous and group.

The stand-in is a rank of the group. Its logprobs are minus the number that its weights hold, so a token
that torn weights sampled, or one with another version's stamp, would show.
"""

from __future__ import annotations

import asyncio
import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import ServerConfig, SGLangConfig
from headway.contracts.config.weight_sync import CollectiveSync, ReceiverConfig
from headway.contracts.errors import BackendError, SyncError
from headway.contracts.http.weights import (
    GroupRankBody,
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
)
from headway.contracts.types import WeightUpdateMeta
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.version_gate import VersionGate
from tests.contract.weight_channel_suite import refusal
from tests.unit.inference_server.sglang_stand_in import StandIn
from tests.unit.inference_server.test_sglang_backend import begin, request
from tests.waiting import until
from weight_sync.receiver import make_receiver
from weight_sync.transports.collective_publisher import CollectivePublisher
from weight_sync.transports.disk import make_local_publisher
from weight_sync.transports.nccl import own_build

DEADLINE_S = 30.0
SHAPES = {"model.norm.weight": (4,), "model.embed.weight": (4096, 64), "lm_head.weight": (4096, 64)}
NUM_BUCKETS = 3
"""Of 1 MiB, the first one with the vector alone."""


def weights(version: float, **changed: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, float(version)) for name, shape in SHAPES.items()} | changed


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Version 4."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({"vocab_size": 60}))
    save_file(weights(4), folder / "a.safetensors")
    return folder


class Trainer:
    """The trainer's end, publishing on a thread of its own."""

    def __init__(self, **config) -> None:
        self.publisher = CollectivePublisher(
            CollectiveSync(shard_bytes=1 << 20, timeout_s=DEADLINE_S, **config)
        )
        self._thread = ThreadPoolExecutor(1)
        self.epoch = 0

    def announce(self, version: int, world_size: int = 2) -> WeightPrepareRequest:
        meta = self.publisher.announce(version)
        self.epoch += 1
        return WeightPrepareRequest(
            epoch=self.epoch,
            version=version,
            path=meta.path,
            group_rank=GroupRankBody(rank=1, world_size=world_size),
            timeout_s=DEADLINE_S,
        )

    def publish(self, version: int, **changed: torch.Tensor) -> Future[WeightUpdateMeta]:
        tensors = weights(version, **changed)
        return self._thread.submit(self.publisher.publish, version, tensors.items())

    async def is_told(self, publishing: Future[WeightUpdateMeta]) -> None:
        """By the gateway, that nobody takes the version: it could wait for another epoch."""
        self.publisher.follow(5, refusal("it was refused"))
        with pytest.raises(SyncError):
            await asyncio.wrap_future(publishing)

    def close(self) -> None:
        self._thread.shutdown()
        self.publisher.close()


@pytest.fixture
def trainer():
    trainer = Trainer()
    yield trainer
    trainer.close()


@asynccontextmanager
async def receiving(model_dir: Path, engine: StandIn, receive: str = "group", **config):
    """A backend on a stand-in behind a gate, all closed at the end."""
    async with engine.serving():
        backend = SGLangBackend(
            SGLangConfig(url=engine.url, receive=receive, **config),
            ModelConfig(path=str(model_dir)),
            version=4,
        )
        gate = VersionGate(backend, make_receiver(ReceiverConfig(allow=("gloo:",))), "keep")
        async with asyncio.timeout(DEADLINE_S):
            await backend.start()
            engine.calls.clear()
            try:
                yield backend, gate
            finally:
                gate.drain()
                await backend.aclose()
                await gate.aclose()


async def prepared(gate: VersionGate, trainer: Trainer, version: int, **changed) -> str:
    """The digest of a version that was staged."""
    order = trainer.announce(version)
    publishing = trainer.publish(version, **changed)
    digest = await gate.prepare(order)
    assert digest == (await asyncio.wrap_future(publishing)).digest
    return digest


async def committed(gate: VersionGate, trainer: Trainer, version: int, policy=None):
    order = WeightCommitRequest(epoch=trainer.epoch, version=version, policy=policy)
    return await gate.commit(order)


def assert_truthful(response) -> None:
    assert response.output_versions == [-logprob for logprob in response.output_logprobs]


async def running_request(backend, engine, on_delta=None):
    """A request with three tokens that are known, and one in flight."""
    [task] = await begin(backend, engine, request("r"), on_delta=on_delta)
    engine.step(4)
    await until(lambda: backend.load().running == 1)
    return task


# A whole transaction.


@pytest.mark.parametrize(
    ("policy", "runs", "reason"),
    [
        ("keep", [(4, 0, 4), (5, 4, 6)], "length"),
        ("recompute", [(4, 0, 4), (5, 4, 6)], "length"),
        ("abort", [(4, 0, 4)], "interrupt"),
        ("drain", [(4, 0, 4)], "interrupt"),
    ],
)
async def test_a_version_flows_into_a_frozen_engine(model_dir, trainer, policy, runs, reason):
    engine, deltas = StandIn(), []
    async with receiving(model_dir, engine) as (backend, gate):
        assert backend.num_ranks == 1
        task = await running_request(backend, engine, deltas.append)
        digest = await prepared(gate, trainer, 5)
        assert (engine.label, engine.session, engine.sampling) == ("4", False, 5.0)
        assert (backend.version, engine.paused) == (4, "in_place")
        engine.step(9)
        answer = await committed(gate, trainer, 5, policy)
        assert (answer.version, answer.running, answer.digest) == (5, 1, digest)
        assert (engine.label, engine.paused, gate.digest) == ("5", None, digest)
        engine.step(9)
        response = await task
        assert (response.version_runs, response.stop_reason) == (runs, reason)
        assert response.num_recomputes == (policy == "recompute")
        assert_truthful(response)
        versions = [delta.version for delta in deltas for _ in delta.output_tokens]
        assert versions == response.output_versions
        assert len(engine.asked("/update_weights_from_distributed")) == NUM_BUCKETS


async def test_the_group_is_kept_from_version_to_version(model_dir, trainer):
    engine = StandIn()
    async with receiving(model_dir, engine) as (backend, gate):
        for version in (5, 6, 7):
            await prepared(gate, trainer, version)
            await committed(gate, trainer, version)
            assert (backend.version, engine.sampling) == (version, float(version))
        assert len(engine.asked("/init_weights_update_group")) == 1
        [task] = await begin(backend, engine, request("r"))
        engine.step(7)
        assert_truthful(await task)


async def test_every_process_of_the_engine_has_a_rank(model_dir):
    engine = StandIn()
    engine.info["tp_size"] = 4
    async with receiving(model_dir, engine) as (backend, _):
        assert backend.num_ranks == 4
    async with receiving(model_dir, engine, "files") as (backend, _):
        assert backend.num_ranks == 1


async def test_requests_that_come_meanwhile_are_for_the_new_version(model_dir, trainer):
    engine = StandIn()
    async with receiving(model_dir, engine) as (backend, gate):
        await prepared(gate, trainer, 5)
        task = asyncio.create_task(backend.generate(request("later")))
        await until(lambda: backend.load().queued == 1)
        assert engine.asked("/generate") == []
        await committed(gate, trainer, 5)
        await engine.until_running(1)
        engine.step(7)
        assert (await task).version_runs == [(5, 0, 6)]


async def test_a_pause_waits_for_the_end_of_a_transfer_and_holds_after_it(model_dir, trainer):
    engine = StandIn()
    async with receiving(model_dir, engine) as (backend, gate):
        await prepared(gate, trainer, 5)
        pausing = asyncio.create_task(backend.pause("in_place"))
        await committed(gate, trainer, 5)
        await pausing
        assert (backend.is_paused, engine.paused) == (True, "in_place")
        await prepared(gate, trainer, 6)
        await committed(gate, trainer, 6)
        assert backend.is_paused
        assert engine.paused is not None
        await backend.resume()
        assert (engine.paused, backend.version) == (None, 6)


async def test_an_old_engine_ends_what_runs_before_the_first_bucket(model_dir, trainer):
    engine = StandIn()
    engine.has_spans = engine.has_sessions = False
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        await prepared(gate, trainer, 5)
        response = await task
        assert (response.version_runs, response.stop_reason) == ([(4, 0, 3)], "interrupt")
        await committed(gate, trainer, 5)
        assert (backend.version, engine.paused) == (5, None)


# What goes wrong.


async def still_serves_four(backend, engine, task) -> None:
    """The old version goes on, also in a request that was frozen meanwhile."""
    await until(lambda: backend._requests.is_open)
    assert (backend.version, engine.label, engine.session) == (4, "4", False)
    assert (engine.sampling, engine.paused, backend.failure) == (4.0, None, None)
    engine.step(9)
    response = await task
    assert (response.version_runs, response.stop_reason) == ([(4, 0, 6)], "length")
    assert_truthful(response)


async def test_an_abort_before_the_first_bucket_never_stops_the_engine(model_dir, trainer):
    engine = StandIn()
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
        await until(lambda: trainer.publisher._rendezvous.plan(5) is not None)  # a rank has joined
        gate.abort(WeightAbortRequest(epoch=1, version=5))
        with pytest.raises(SyncError, match="was aborted"):
            await preparing
        assert engine.asked("/pause_generation") == []
        await still_serves_four(backend, engine, task)


@pytest.mark.parametrize("number", [0, 1])
async def test_an_abort_in_the_middle_brings_the_old_version_back(model_dir, trainer, number):
    engine = StandIn()
    engine.holds_at = number
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
        publishing = trainer.publish(5)
        await engine.holding.wait()
        gate.abort(WeightAbortRequest(epoch=1, version=5))
        engine.go_on.set()
        with pytest.raises(SyncError, match="was aborted"):
            await preparing
        await trainer.is_told(publishing)
        await still_serves_four(backend, engine, task)
        engine.holds_at = None
        await prepared(gate, trainer, 6)  # in a new group
        await committed(gate, trainer, 6)
        assert engine.sampling == 6.0


async def test_a_version_that_is_not_committed_is_taken_back(model_dir, trainer):
    engine = StandIn()
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        await prepared(gate, trainer, 5)
        gate.abort(WeightAbortRequest(epoch=1, version=5))
        await still_serves_four(backend, engine, task)
        with pytest.raises(SyncError, match="was aborted"):
            await committed(gate, trainer, 5)
        await prepared(gate, trainer, 6)  # in the same group
        await committed(gate, trainer, 6)
        assert len(engine.asked("/init_weights_update_group")) == 1


async def test_a_server_that_ends_leaves_an_attached_engine_as_it_was(model_dir, trainer):
    engine = StandIn()
    async with receiving(model_dir, engine) as (_, gate):
        await prepared(gate, trainer, 5)
        assert engine.sampling == 5.0
    assert (engine.sampling, engine.label, engine.paused) == (4.0, "4", None)


async def test_torn_weights_that_cannot_be_brought_back_end_the_engine(model_dir, trainer):
    engine = StandIn()
    async with receiving(model_dir, engine) as (backend, gate):
        await prepared(gate, trainer, 5)
        await committed(gate, trainer, 5)
        task = await running_request(backend, engine)
        await prepared(gate, trainer, 6)
        gate.abort(WeightAbortRequest(epoch=2, version=6))
        with pytest.raises(BackendError, match="torn"):
            await task
        assert "version 5 is not stored anywhere" in (backend.failure or "")
        assert engine.paused is not None


async def test_a_bucket_that_the_engine_refuses_ends_the_version_for_all(model_dir, trainer):
    engine = StandIn()
    engine.fails_at = 1
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
        publishing = trainer.publish(5)
        with pytest.raises(SyncError, match="partially updated"):
            await preparing
        await trainer.is_told(publishing)
        await still_serves_four(backend, engine, task)


async def test_a_trainer_that_gives_up_in_the_middle_leaves_the_old_version(model_dir, trainer):
    engine = StandIn()
    engine.holds_at = 1
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
        publishing = trainer.publish(5)
        await engine.holding.wait()
        trainer.publisher.follow(5, refusal("the step was bad"))
        with pytest.raises(SyncError, match="the step was bad"):
            await asyncio.wrap_future(publishing)
        engine.go_on.set()
        with pytest.raises(SyncError, match="the step was bad"):
            await preparing
        await still_serves_four(backend, engine, task)


async def test_an_engine_that_dies_in_the_middle_fails_the_version_and_the_server(
    model_dir, trainer
):
    engine = StandIn()
    engine.holds_at = 1
    async with receiving(model_dir, engine) as (backend, gate):
        preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
        publishing = trainer.publish(5)
        await engine.holding.wait()
        await engine.die()
        with pytest.raises(BackendError):
            await preparing
        await trainer.is_told(publishing)
        await until(lambda: backend.failure is not None)


async def test_what_arrived_otherwise_than_published_is_refused(model_dir, trainer):
    engine = StandIn()
    engine.damages = "model.norm.weight"
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
        publishing = trainer.publish(5)
        with pytest.raises(SyncError, match="did not arrive"):
            await preparing
        await trainer.is_told(publishing)
        await still_serves_four(backend, engine, task)


async def test_an_engine_that_shows_no_weights_is_believed(model_dir, trainer, caplog):
    engine = StandIn()
    engine.shows_weights = False
    caplog.set_level(logging.INFO, "inference_server")
    async with receiving(model_dir, engine) as (backend, gate):
        await prepared(gate, trainer, 5)
        await committed(gate, trainer, 5)
        assert backend.version == 5
    assert [r.compared for r in caplog.records if hasattr(r, "compared")] == [0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model.norm.weight": torch.zeros(5)}, "another model"),
        ({"extra": torch.zeros(5)}, r"extra \['extra'\]"),
    ],
)
async def test_a_version_of_another_model_is_refused(model_dir, trainer, changed, message):
    engine = StandIn()
    async with receiving(model_dir, engine) as (backend, gate):
        task = await running_request(backend, engine)
        preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
        publishing = trainer.publish(5, **changed)
        with pytest.raises(SyncError, match=message):
            await preparing
        await trainer.is_told(publishing)
        await still_serves_four(backend, engine, task)


async def test_rounded_weights_are_refused_before_the_first_bucket(model_dir):
    trainer, engine = Trainer(quantization="int8"), StandIn()
    try:
        async with receiving(model_dir, engine) as (backend, gate):
            task = await running_request(backend, engine)
            preparing = asyncio.create_task(gate.prepare(trainer.announce(5)))
            publishing = trainer.publish(5)
            with pytest.raises(SyncError, match=r"set backend\.receive to files"):
                await preparing
            await trainer.is_told(publishing)
            await still_serves_four(backend, engine, task)
    finally:
        trainer.close()


async def test_handles_are_refused_before_a_seat_is_taken(model_dir):
    trainer, engine = Trainer(backend="ipc"), StandIn()
    try:
        async with receiving(model_dir, engine) as (backend, gate):
            task = await running_request(backend, engine)
            with pytest.raises(SyncError, match=r"no handles.*set backend\.receive to files"):
                await gate.prepare(trainer.announce(5))
            await still_serves_four(backend, engine, task)
    finally:
        trainer.close()


async def test_an_engine_of_ours_is_asked_for_its_nccl_and_only_where_that_is_needed(model_dir):
    ours = SGLangBackend(SGLangConfig(receive="group"), ModelConfig(path=str(model_dir)), 4)
    other = SGLangBackend(SGLangConfig(url="http://h:1"), ModelConfig(path=str(model_dir)), 4)
    nccl, gloo = (WeightUpdateMeta(5, f"{name}://trainer:1/v00000005") for name in ("nccl", "gloo"))
    assert ours._build_for(nccl) == own_build()
    assert ours._build_for(gloo) is None
    assert other._build_for(nccl) is None


async def test_versions_that_do_not_flow_come_as_files_too(model_dir, trainer, tmp_path):
    engine = StandIn()
    async with receiving(model_dir, engine) as (_, gate):
        await prepared(gate, trainer, 5)
        await committed(gate, trainer, 5)
        publisher = make_local_publisher(str(tmp_path))
        meta = publisher.publish(6, weights(6).items())
        publisher.close()
        gate.receiver._config = ReceiverConfig(allow=(str(tmp_path),))
        order = WeightPrepareRequest(epoch=2, version=6, path=meta.path)
        await gate.prepare(order)
        assert engine.paused is None
        await gate.commit(WeightCommitRequest(epoch=2, version=6))
        assert engine.sampling == 6.0


@pytest.mark.parametrize("flag", ["pp_size", "dp_size"])
async def test_an_engine_with_ranks_out_of_reach_is_refused_at_the_start(model_dir, flag):
    engine = StandIn()
    engine.info[flag] = 2
    with pytest.raises(Exception, match="cannot join a trainer's group"):
        async with receiving(model_dir, engine):
            pass


def test_draining_is_refused_where_weights_are_overwritten_first():
    with pytest.raises(ValidationError, match="choose another policy"):
        ServerConfig(
            model=ModelConfig(path="/m"),
            backend=SGLangConfig(receive="group"),
            update_policy="drain",
        )
