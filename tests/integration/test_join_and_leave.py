"""Servers come and go under load while versions are published: 1, 3, then 1 again.

The model's tokens say by themselves which weights sampled them (`version_model`), so what servers claim
of every token is compared with the token.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Literal

import pytest

from gateway.fleet.resume import generate_whole
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DiskSync,
    HttpSync,
    SharedMemorySync,
    WeightSyncConfig,
)
from headway.contracts.errors import ServiceError
from headway.contracts.http.servers import ServerStatus
from headway.contracts.types import LLMRequest, LLMResponse, PolicyVersion, WeightUpdateMeta
from headway.launch.launchers.local import LocalRun
from headway.runtime.inference_client import RemoteInferenceEngine
from tests.integration.builders import generation, rollout
from tests.integration.conftest import run_config, with_weight_sync
from tests.integration.version_model import logprob_of, token_of, weights_of, write_version_model
from tests.processes import local_run
from tests.waiting import eventually
from weight_sync.channel import WeightPublisher
from weight_sync.publication import Publication
from weight_sync.store import version_name
from weight_sync.transports.base import make_publisher

SHORT_RUN = ("test_servers_join_and_leave_while_versions_are_published[http]",)

NUM_VERSIONS = 20
JOINS = (3, 7)
DRAINED = 12
"""During this publication the first server gets SIGTERM."""
KILLED = 16
"""During this one the second gets SIGKILL."""
NUM_STREAMS = 6
TOKENS = 120
GREEDY = SamplingConfig(temperature=0.0, max_new_tokens=40, ignore_eos=True)

LIMIT_S = 60.0
"""For what takes a fraction of it, or a few seconds to start."""

Connect = Callable[[str], RemoteInferenceEngine]


@pytest.fixture(scope="module")
def version_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_version_model(tmp_path_factory.mktemp("version-model"))


@pytest.fixture
def shared_root() -> Iterator[Path]:
    """A folder in memory."""
    folder = Path(tempfile.mkdtemp(prefix="headway-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["disk", "http", "shared_memory", "collective", "ipc"])
def sync(request: pytest.FixtureRequest, tmp_path: Path, shared_root: Path) -> WeightSyncConfig:
    root, shard_bytes = str(tmp_path / "weights"), 1 << 20  # several parts
    if request.param == "disk":
        return DiskSync(root=root, shard_bytes=shard_bytes)
    if request.param == "http":
        return HttpSync(root=root, shard_bytes=shard_bytes)
    if request.param == "shared_memory":
        return SharedMemorySync(root=str(shared_root / "weights"), shard_bytes=shard_bytes)
    backend: Literal["gloo", "ipc"] = "ipc" if request.param == "ipc" else "gloo"
    return CollectiveSync(backend=backend, shard_bytes=shard_bytes)


class Servers:
    """Generation servers of one gateway, each with a folder of its own."""

    def __init__(self, config_of: Callable[[str], LaunchConfig], run: LocalRun) -> None:
        self._config_of = config_of
        self._url = run.url
        self._runs = [run]

    def join(self, client: RemoteInferenceEngine) -> None:
        """Start one more; returns once it has caught up and takes traffic."""
        count = len(ready(client))
        run = local_run(self._config_of(f"server-{len(self._runs)}"))
        run.url = self._url
        self._runs.append(run)
        run.start_servers()
        eventually(lambda: len(ready(client)) == count + 1, LIMIT_S, "one more server is ready")

    def leave(self, number: int, how: signal.Signals) -> None:
        """End one; returns once its process is gone."""
        process = self._runs[number].process("server-0")
        os.kill(process.pid, how)
        assert process.wait(LIMIT_S) == (130 if how == signal.SIGTERM else -how), process.log_tail()

    def stop(self) -> None:
        for run in self._runs:
            run.stop()


class Uploader:
    """Publishes the tensors of a version, and does something in the middle."""

    def __init__(self, publisher: WeightPublisher, model: Path) -> None:
        self._publisher = publisher
        self._model = model
        self.midway: Callable[[], None] | None = None

    def upload_weights(self, meta: WeightUpdateMeta | None) -> None:
        assert meta is not None
        self._publisher.publish(meta.version, self._tensors(meta.version))

    def _tensors(self, version: PolicyVersion):
        tensors = list(weights_of(self._model, version))
        yield from tensors[: len(tensors) * 2 // 3]
        if self.midway is not None:
            self.midway()
        yield from tensors[len(tensors) * 2 // 3 :]


class Traffic:
    """Requests and rollouts without a pause; whatever comes back is checked."""

    def __init__(self, client: RemoteInferenceEngine, player: RemoteInferenceEngine) -> None:
        self._client = client
        self._runner = player
        self._is_over = asyncio.Event()
        self.committed = 0
        """Whatever is asked from now on is answered by this version or a newer one."""
        self.seen: set[PolicyVersion] = set()
        self.num_groups = 0

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[None]:
        """Everything that was begun is answered in the end."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(NUM_STREAMS):
                tasks.create_task(self._stream(number))
            tasks.create_task(self._play())
            try:
                yield
            finally:
                self._is_over.set()

    async def _stream(self, number: int) -> None:
        count = 0
        while not self._is_over.is_set():
            count += 1
            floor = self.committed
            response = await self._whole(generation(f"s{number}.{count}", TOKENS, temperature=0.0))
            versions = response.output_versions
            self._check(response.output_tokens, response.output_logprobs, versions, floor, TOKENS)

    async def _whole(self, request: LLMRequest) -> LLMResponse:
        """What a caller of a gateway does: ask again when a server died, go on when one drained."""
        while True:
            try:
                return await generate_whole(self._client.agenerate, str, request)
            except ServiceError as error:
                if not error.retryable:
                    raise

    async def _play(self) -> None:
        while not self._is_over.is_set():
            floor = self.committed
            requests = [
                rollout(f"r{self.num_groups + n}").model_copy(update={"gconfig": GREEDY})
                for n in range(4)
            ]
            batch = await asyncio.to_thread(self._runner.rollout, requests, LIMIT_S)
            for trajectory in batch.trajectories:
                mask = trajectory.loss_mask
                columns = (trajectory.input_ids, trajectory.logprobs, trajectory.versions)
                rows = [column[mask].tolist() for column in columns]
                self._check(*rows, floor, GREEDY.max_new_tokens)
            self.num_groups += len(requests)

    def _check(
        self,
        tokens: list[int],
        logprobs: list[float],
        versions: list[PolicyVersion],
        floor: PolicyVersion,
        count: int,
    ) -> None:
        assert len(tokens) == len(logprobs) == len(versions) == count
        assert tokens == [token_of(version) for version in versions]
        assert logprobs == pytest.approx([logprob_of(version) for version in versions], abs=1e-4)
        assert min(versions) >= floor
        self.seen.update(versions)


def ready(client: RemoteInferenceEngine) -> list[ServerStatus]:
    return [server for server in client.status().servers if server.state == "ready"]


def is_generating(client: RemoteInferenceEngine) -> bool:
    return any(server.running for server in ready(client))


def serve_the_same(
    client: RemoteInferenceEngine, version: PolicyVersion, count: int | None = None
) -> bool:
    """Whether this is committed, and all that are ready, so many, serve exactly it."""
    committed = client.weights().committed
    assert committed is not None and committed.version == version
    served = [(server.version, server.digest) for server in ready(client)]
    return served == [(version, committed.digest)] * (count or max(1, len(served)))


def publish_all(
    sync: WeightSyncConfig,
    model: Path,
    client: RemoteInferenceEngine,
    servers: Servers,
    traffic: Traffic,
) -> None:
    """Every version; on one thread to its end, since a child dies with the thread that started it."""
    join = partial(servers.join, client)
    midway = {
        JOINS[0]: join,
        JOINS[1]: join,
        DRAINED: partial(servers.leave, 0, signal.SIGTERM),
        KILLED: partial(servers.leave, 1, signal.SIGKILL),
    }
    with closing(make_publisher(sync)) as publisher:
        uploader = Uploader(publisher, model)
        publication = Publication(uploader, publisher, client)
        for version in range(1, NUM_VERSIONS + 1):
            if version == JOINS[1] and not isinstance(sync, CollectiveSync):
                # Only the servers have the committed version now.
                shutil.rmtree(Path(sync.root) / version_name(version - 1))
            uploader.midway = midway.get(version)
            publication.begin(version)
            publication.finish()
            traffic.committed = version
            count = 2 + JOINS.index(version) if version in JOINS else None
            # A report that was on its way at the commit still tells of the version before.
            eventually(
                lambda v=version, n=count: serve_the_same(client, v, n),
                LIMIT_S,
                f"{count or 'all ready'} servers serve version {version}",
            )


async def test_servers_join_and_leave_while_versions_are_published(
    tmp_path: Path, version_model: Path, sync: WeightSyncConfig, start, connect: Connect
) -> None:
    def config_of(name: str) -> LaunchConfig:
        config = run_config(tmp_path / name, version_model, num_slots=16)
        service = config.server.service.model_copy(update={"drain_timeout_s": 0.0})
        server = config.server.model_copy(update={"service": service})
        # The test kills servers, whatever is in flight there.
        fleet = config.gateway.fleet.model_copy(update={"max_deaths": 100})
        gateway = config.gateway.model_copy(update={"fleet": fleet})
        changes = {"server": server, "gateway": gateway}
        return with_weight_sync(config.model_copy(update=changes), sync)

    run = start(config_of("server-0"))
    servers = Servers(config_of, run)
    client = connect(run.url)
    traffic = Traffic(client, connect(run.url))
    try:
        async with traffic.flowing():
            await asyncio.to_thread(
                eventually, lambda: is_generating(client), LIMIT_S, "it generates"
            )
            await asyncio.to_thread(publish_all, sync, version_model, client, servers, traffic)
        audit = await asyncio.to_thread(client.audit)
        status = await asyncio.to_thread(client.status)
        assert serve_the_same(client, NUM_VERSIONS, 1)
    finally:
        await client.aclose()
        await asyncio.to_thread(servers.stop)
    assert (audit.lost, audit.duplicated) == (0, 0)
    assert audit.counts.delivered == audit.counts.submitted == 2 * traffic.num_groups
    assert status.updates == NUM_VERSIONS
    assert status.updates_in_flight > NUM_VERSIONS // 2
    assert traffic.seen >= {version - 1 for version in JOINS}
