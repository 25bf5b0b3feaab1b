"""Versions from every transport, as files, through the gate, into engines that generate meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.contracts.config.model import ModelConfig
from headway.contracts.config.server import SGLangConfig, VLLMConfig
from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DeltaConfig,
    DiskSync,
    HttpSync,
    ReceiverConfig,
    SharedMemorySync,
)
from headway.contracts.errors import SyncError
from headway.contracts.http.weights import (
    GroupRankBody,
    WeightAbortRequest,
    WeightCommitRequest,
    WeightPrepareRequest,
)
from inference_server.backends.sglang.backend import SGLangBackend
from inference_server.backends.vllm.backend import VLLMBackend
from inference_server.version_gate import VersionGate
from tests.unit.inference_server.sglang_stand_in import StandIn
from tests.unit.inference_server.vllm_stand_in import VLLMStandIn
from weight_sync.channel import WeightPublisher
from weight_sync.manifest import parse_manifest
from weight_sync.receiver import make_receiver
from weight_sync.transports.base import make_publisher

DEADLINE_S = 30.0
SHAPES = {"model.norm.weight": (4,), "model.embed.weight": (512, 64), "lm_head.weight": (512, 64)}


def weights(version: int) -> dict[str, torch.Tensor]:
    """Of a training that moves a few values per step."""
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for step in range(version):
        for tensor in tensors.values():
            tensor.view(-1)[step % 3] += step + 1
    return tensors


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"vocab_size": 61, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights(0), folder / "a.safetensors")
    return folder


class SGLang:
    """The engine, as the tests see either of them."""

    def __init__(self) -> None:
        self.engine = StandIn()

    @asynccontextmanager
    async def backend(self, model_dir: Path):
        async with self.engine.serving():
            config = SGLangConfig(url=self.engine.url)
            backend = SGLangBackend(config, ModelConfig(path=str(model_dir)), 0)
            await backend.start()
            yield backend

    def stopped(self) -> bool:
        return self.engine.paused is not None

    def loaded(self) -> dict[str, torch.Tensor]:
        return self.engine.weights


class VLLM:
    def __init__(self) -> None:
        self.engine = VLLMStandIn()

    @asynccontextmanager
    async def backend(self, model_dir: Path):
        await self.engine.start()
        config = VLLMConfig(url=self.engine.url, health_interval_s=0.05)
        backend = VLLMBackend(config, ModelConfig(path=str(model_dir)), 0)
        await backend.start()
        try:
            yield backend
        finally:
            await self.engine.close()

    def stopped(self) -> bool:
        return self.engine.paused is not None

    def loaded(self) -> dict[str, torch.Tensor]:
        """It keeps the path: what it would read now."""
        files = sorted(Path(self.engine.weights_path or "").glob("*.safetensors"))
        return {name: tensor for file in files for name, tensor in load_file(file).items()}


@pytest.fixture(params=[SGLang, VLLM])
def kind(request):
    return request.param()


@dataclass
class Server:
    """One engine behind a gate, with a trainer that publishes to it."""

    kind: SGLang | VLLM
    gate: VersionGate
    publisher: WeightPublisher
    thread: ThreadPoolExecutor
    epoch: int = 0

    async def prepare(self, version: int, *fallbacks: str) -> str:
        meta = self.publisher.announce(version)
        publishing = self.thread.submit(self.publisher.publish, version, weights(version).items())
        self.epoch += 1
        group_rank = GroupRankBody(rank=1, world_size=2) if meta.path.startswith("gloo") else None
        order = WeightPrepareRequest(
            epoch=self.epoch,
            version=version,
            path=meta.path,
            fallbacks=fallbacks,
            group_rank=group_rank,
        )
        digest = await self.gate.prepare(order)
        assert not self.kind.stopped()
        assert digest == (await asyncio.wrap_future(publishing)).digest
        return digest

    async def commit(self, version: int) -> None:
        await self.gate.commit(WeightCommitRequest(epoch=self.epoch, version=version))
        assert self.gate.version == version
        assert not self.kind.stopped()
        loaded = self.kind.loaded()
        for name, tensor in weights(version).items():
            assert torch.equal(loaded[name], tensor)


@contextmanager
def publishing(config) -> Iterator[tuple[WeightPublisher, str]]:
    publisher = make_publisher(config)
    try:
        yield publisher, config.origin
    finally:
        publisher.close()


@asynccontextmanager
async def serving(kind, model_dir: Path, config, cache: Path | None):
    with publishing(config) as (publisher, origin), ThreadPoolExecutor(1) as thread:
        receiver = make_receiver(
            ReceiverConfig(allow=(origin,), cache_dir=None if cache is None else str(cache))
        )
        async with asyncio.timeout(DEADLINE_S), kind.backend(model_dir) as backend:
            gate = VersionGate(backend, receiver)
            try:
                yield Server(kind, gate, publisher, thread)
            finally:
                await backend.aclose()
                await gate.aclose()


def versions_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("v*"))


TRANSPORTS = {
    "disk": lambda root: DiskSync(root=str(root)),
    "deltas on a disk": lambda root: DiskSync(root=str(root), delta=DeltaConfig()),
    "shared memory": lambda root: SharedMemorySync(root=str(root)),
    "deltas in shared memory": lambda root: SharedMemorySync(root=str(root), delta=DeltaConfig()),
    "http": lambda root: HttpSync(root=str(root)),
    "8 bits over http": lambda root: HttpSync(root=str(root), quantization="int8"),
    "gloo": lambda _: CollectiveSync(timeout_s=DEADLINE_S),
}


@pytest.mark.parametrize("name", [name for name in TRANSPORTS if "8 bits" not in name])
async def test_every_transport_reaches_an_engine_that_reads_files(kind, model_dir, tmp_path, name):
    cache = tmp_path / "cache"
    async with serving(kind, model_dir, TRANSPORTS[name](tmp_path / "run"), cache) as server:
        for version in (1, 2, 3, 5):
            digest = await server.prepare(version)
            assert len(versions_in(cache)) <= 2
            await server.commit(version)
            assert (server.gate.digest, len(versions_in(cache)) <= 1) == (digest, True)
    assert versions_in(cache) == []


async def test_rounded_versions_are_laid_out_whole(kind, model_dir, tmp_path):
    config = TRANSPORTS["8 bits over http"](tmp_path / "run")
    async with serving(kind, model_dir, config, tmp_path / "cache") as server:
        await server.prepare(1)
        await server.gate.commit(WeightCommitRequest(epoch=1, version=1))
        for name, tensor in weights(1).items():
            assert torch.allclose(server.kind.loaded()[name], tensor, atol=0.01)


async def test_what_was_staged_and_aborted_makes_room_for_the_next(kind, model_dir, tmp_path):
    cache = tmp_path / "cache"
    config = TRANSPORTS["deltas on a disk"](tmp_path / "run")
    async with serving(kind, model_dir, config, cache) as server:
        await server.prepare(1)
        await server.commit(1)
        await server.prepare(2)
        await server.commit(2)
        await server.prepare(3)
        server.gate.abort(WeightAbortRequest(epoch=3, version=3))
        with pytest.raises(SyncError):
            await server.commit(3)
        assert server.gate.version == 2
        await server.prepare(4)
        assert versions_in(cache) == ["v00000002", "v00000004"]
        await server.commit(4)


async def test_a_version_that_was_mended_from_a_peer_is_laid_out_anew(kind, model_dir, tmp_path):
    """The engine would read the damaged file."""
    peer, cache = tmp_path / "peer", tmp_path / "cache"
    with publishing(DiskSync(root=str(peer))) as (publisher, _):
        publisher.publish(1, weights(1).items())
    config = DiskSync(root=str(tmp_path / "run"))
    async with serving(kind, model_dir, config, cache) as server:
        server.gate.receiver._config = ReceiverConfig(allow=(str(tmp_path),), cache_dir=str(cache))
        meta = server.publisher.publish(1, weights(1).items())
        damage(Path(meta.path))
        order = WeightPrepareRequest(
            epoch=1, version=1, path=meta.path, fallbacks=(str(peer / "v00000001"),)
        )
        assert await server.gate.prepare(order) == meta.digest
        assert versions_in(cache) == ["v00000001"]
        server.epoch = 1
        await server.commit(1)


def damage(folder: Path) -> None:
    """One bit of the last tensor."""
    entry = parse_manifest((folder / "manifest.json").read_bytes(), "it").tensors[-1]
    with (folder / entry.blob).open("r+b") as file:
        file.seek(entry.offset)
        byte = file.read(1)[0]
        file.seek(entry.offset)
        file.write(bytes([byte ^ 1]))


async def test_without_a_place_given_nothing_is_left_behind(kind, model_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    home = tmp_path / "tmp" / f"headway-weights-{os.getuid()}"
    left = home / "of a server that was killed"
    left.mkdir(parents=True)
    home.chmod(0o700)
    config = TRANSPORTS["deltas on a disk"](tmp_path / "run")
    async with serving(kind, model_dir, config, None) as server:
        for version in (1, 2):
            await server.prepare(version)
            await server.commit(version)
        [folder] = [path for path in home.iterdir() if path.is_dir()]
        assert folder != left
        assert versions_in(folder) == ["v00000002"]
    assert [path for path in home.iterdir() if path.is_dir()] == []
