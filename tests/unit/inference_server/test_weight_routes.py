"""Weights over a server's own routes: published from disk, committed, and given to a peer."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
import yaml

from headway.contracts.errors import Fenced, SyncError
from headway.contracts.http import paths
from headway.contracts.http.weights import WeightPrepareResponse, WeightUpdateResponse, held_root
from headway.contracts.types import WeightUpdateMeta
from headway.runtime.process import ProcessSpec
from tests.processes import start_process
from tests.unit.inference_server.test_serving import DEADLINE_S, Served, body, serving
from weight_sync.channel import VerifiedVersion
from weight_sync.manifest import MANIFEST_NAME, parse_manifest
from weight_sync.publisher import StoredPublisher
from weight_sync.transports.disk import make_local_publisher

TENSORS = {
    "embed": torch.arange(600_000, dtype=torch.float32).reshape(300, 2000),
    "norm": torch.full((7,), 0.5, dtype=torch.bfloat16),
    "tied": torch.arange(600_000, dtype=torch.float32).reshape(300, 2000),
    "empty": torch.empty((0, 3)),
}


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[StoredPublisher]:
    publisher = make_local_publisher(str(tmp_path / "weights"))
    yield publisher
    publisher.close()


def serving_weights(tmp_path: Path, peers: bool = True, **fields):
    allow = [str(tmp_path / "weights")]
    return serving(weights={"allow": allow, "peers": peers}, **fields)


def order(epoch: int, meta: WeightUpdateMeta, **fields) -> dict[str, object]:
    given = {"epoch": epoch, "version": meta.version, "path": meta.path, "digest": meta.digest}
    return given | fields


async def publish(served: Served, epoch: int, meta: WeightUpdateMeta) -> WeightUpdateResponse:
    status, content = await served.post(paths.WEIGHTS_PREPARE, order(epoch, meta))
    assert status == 200, content
    assert WeightPrepareResponse.model_validate_json(content).digest == meta.digest
    wanted = {"epoch": epoch, "version": meta.version}
    status, content = await served.post(paths.WEIGHTS_COMMIT, wanted)
    assert status == 200, content
    return WeightUpdateResponse.model_validate_json(content)


def held(version: int, blob: str) -> str:
    return paths.WEIGHTS_HELD.format(version=version, blob=blob)


async def fetch(served: Served, path: str, **headers: str) -> tuple[int, bytes, str | None]:
    async with served.http.get(served.url + path, headers=headers) as answer:
        return answer.status, await answer.read(), answer.headers.get("content-range")


# Publication.


async def test_a_version_is_published_and_reported(tmp_path, publisher):
    meta = publisher.publish(1, TENSORS.items())
    async with serving_weights(tmp_path) as served:
        running = asyncio.create_task(served.post(paths.GENERATE, body("a", 10_000)))
        await served.until(lambda: served.running)
        answer = await publish(served, 1, meta)
        assert (answer.version, answer.running, answer.digest) == (1, 1, meta.digest)
        report = served.generator.report("s", "http://h:1")
        assert (report.version, report.digest, report.num_ranks) == (1, meta.digest, 1)
        fenced = await served.refused(paths.WEIGHTS_PREPARE, order(0, meta))
        assert isinstance(fenced, Fenced)
        status, _ = await served.post(paths.WEIGHTS_ABORT, {"epoch": 2, "version": 9})
        assert status == 204
        running.cancel()


async def test_what_the_publisher_is_still_writing_can_be_staged_and_given_up(tmp_path, publisher):
    meta = publisher.announce(1)
    async with serving_weights(tmp_path) as served:
        dead = asyncio.create_task(served.post(paths.WEIGHTS_PREPARE, order(1, meta)))
        await served.until(lambda: served.generator.gate._state.staging)
        dead.cancel()  # the gateway was killed; another one comes
        preparing = asyncio.create_task(served.post(paths.WEIGHTS_PREPARE, order(2, meta)))
        await served.until(lambda: served.generator.gate.epoch == 2)
        await asyncio.to_thread(publisher.publish, 1, TENSORS.items())
        assert (await preparing)[0] == 200
        meta = publisher.announce(2)
        preparing = asyncio.create_task(served.refused(paths.WEIGHTS_PREPARE, order(3, meta)))
        await served.until(lambda: served.generator.gate.epoch == 3)
        await served.post(paths.WEIGHTS_ABORT, {"epoch": 3, "version": 2})
        assert "version 2 was aborted" in (await preparing).message


async def test_a_lone_server_takes_a_version_in_one_call(tmp_path, publisher):
    metas = [publisher.publish(version, TENSORS.items()) for version in (1, 2)]
    async with serving_weights(tmp_path) as served:
        for meta in (metas[0], metas[1], metas[1]):
            status, content = await served.post(
                paths.WEIGHTS, {"version": meta.version, "path": meta.path}
            )
            assert status == 200, content
        assert (served.generator.version, served.generator.gate.served.updates) == (2, 2)
        late = {"version": 1, "path": metas[0].path}
        assert (await served.refused(paths.WEIGHTS, late)).code == "stale_version"
        elsewhere = await served.refused(paths.WEIGHTS, {"version": 3, "path": "/elsewhere"})
        assert isinstance(elsewhere, SyncError)
        assert "add it to weights.allow" in elsewhere.message


async def test_one_version_sent_twice_at_once_is_read_once(tmp_path, publisher):
    meta = publisher.announce(1)
    async with serving_weights(tmp_path) as served:
        wanted = {"version": 1, "path": meta.path}
        posts = [asyncio.create_task(served.post(paths.WEIGHTS, wanted)) for _ in range(2)]
        await served.until(lambda: served.generator.gate.epoch > 0)
        await asyncio.to_thread(publisher.publish, 1, TENSORS.items())
        assert [(await post)[0] for post in posts] == [200, 200]
        assert served.generator.gate.served.updates == 1


# Peers.


async def test_a_peer_stages_what_a_server_holds(tmp_path, publisher):
    meta = publisher.publish(1, TENSORS.items())
    async with serving_weights(tmp_path) as first, serving(weights={"peers": True}) as second:
        await publish(first, 1, meta)
        url = first.url + held_root(1)
        copied = WeightUpdateMeta(1, url, meta.digest)
        assert (await publish(second, 1, copied)).digest == meta.digest
        copy = second.generator.gate.receiver.held(1)
        assert all(torch.equal(copy.tensors[name], TENSORS[name]) for name in TENSORS)
        async with serving(weights={"peers": True}) as third:  # from a copy of a copy
            url = second.url + held_root(1)
            assert (await publish(third, 1, WeightUpdateMeta(1, url, meta.digest))).version == 1


async def test_a_version_looks_like_a_directory_of_whole_tensors(tmp_path, publisher):
    meta = publisher.publish(1, TENSORS.items())
    async with serving_weights(tmp_path) as served:
        await publish(served, 1, meta)
        status, text, _ = await fetch(served, held(1, MANIFEST_NAME))
        manifest = parse_manifest(text, "held")
        assert (status, manifest.kind, manifest.digest) == (200, "full", meta.digest)
        blobs = {entry.name: entry.blob for entry in manifest.tensors}
        assert blobs["embed"] == blobs["tied"]
        for entry in manifest.tensors:
            _, content, _ = await fetch(served, held(1, entry.blob))
            expected = TENSORS[entry.name].contiguous().view(-1)
            assert content == expected.view(torch.uint8).numpy().tobytes()
            assert (entry.offset, entry.size, entry.codec) == (0, len(content), "raw")


async def test_a_range_of_a_tensor_is_given_alone(tmp_path, publisher):
    meta = publisher.publish(1, {"w": torch.arange(100, dtype=torch.float32)}.items())
    whole = torch.arange(100, dtype=torch.float32).numpy().tobytes()
    async with serving_weights(tmp_path) as served:
        await publish(served, 1, meta)
        path = held(1, "t-00000")
        for asked, start, end in (
            ("bytes=0-0", 0, 1),
            ("bytes=8-15", 8, 16),
            ("bytes=390-", 390, 400),
            ("bytes=396-9999", 396, 400),
            ("bytes=-4", 396, 400),
            ("bytes=0-399", 0, 400),
            ("bytes=-9999", 0, 400),
        ):
            given = await fetch(served, path, range=asked)
            assert given == (206, whole[start:end], f"bytes {start}-{end - 1}/400"), asked
        for asked in ("bytes=400-", "bytes=-0", "bytes=500-600"):
            assert await fetch(served, path, range=asked) == (416, b"", "bytes */400")
        for asked in ("bytes=5-2", "bytes=0-1,4-5", "lines=1-2", "bytes=-", "bytes=a-b"):
            assert await fetch(served, path, range=asked) == (200, whole, None)


async def test_a_server_that_gives_nothing_away_relays_nothing():
    group = {
        "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2,
        "group_name": "g", "backend": "gloo",
    }  # fmt: skip
    step = {"step": "join", "body": group, "version": 0, "head": 0}
    async with serving(weights={"peers": False}) as served:
        status, content = await served.post(paths.WEIGHTS_RELAY, step)
        assert status == 400 and b"weights.peers is false" in content


async def test_nothing_else_is_given_away(tmp_path, publisher):
    meta = publisher.publish(1, TENSORS.items())
    async with serving_weights(tmp_path) as served, serving_weights(tmp_path, peers=False) as shy:
        await publish(served, 1, meta)
        await publish(shy, 1, meta)
        for one, path, status in (
            (served, held(0, MANIFEST_NAME), 404),
            (served, held(2, MANIFEST_NAME), 404),
            (served, held(1, "t-99999"), 404),
            (served, held(1, "shard-00000.safetensors"), 404),
            (served, held(1, "..%2Fmanifest.json"), 404),
            (served, held(1, ".hidden"), 422),
            (served, paths.WEIGHTS_HELD.format(version=-1, blob=MANIFEST_NAME), 422),
            (shy, held(1, MANIFEST_NAME), 404),
        ):
            assert (await fetch(one, path))[0] == status, path
        await publish(served, 2, publisher.publish(2, TENSORS.items()))
        assert (await fetch(served, held(1, MANIFEST_NAME)))[0] == 404
        assert (await fetch(served, held(2, MANIFEST_NAME)))[0] == 200


async def test_a_version_in_a_folder_is_given_as_its_files(tmp_path, publisher):
    meta = publisher.publish(1, TENSORS.items())
    folder = Path(meta.path)
    (folder / "secret").write_text("no part of the version")
    async with serving_weights(tmp_path) as served:
        receiver = served.generator.gate.receiver
        receiver.keep(VerifiedVersion(1, meta.digest, folder))
        _, text, _ = await fetch(served, held(1, MANIFEST_NAME))
        for blob in {entry.blob for entry in parse_manifest(text, "held").tensors}:
            whole = (folder / blob).read_bytes()
            assert (await fetch(served, held(1, blob)))[1] == whole
            ranged = await fetch(served, held(1, blob), range="bytes=10-19")
            assert ranged[:2] == (206, whole[10:20])
        assert (await fetch(served, held(1, "secret")))[0] == 404
        receiver.keep(VerifiedVersion(1, "f" * 64, folder))  # what lies there is another
        assert (await fetch(served, held(1, MANIFEST_NAME)))[0] == 404
        receiver.keep(VerifiedVersion(1, meta.digest, tmp_path / "gone"))
        assert (await fetch(served, held(1, blob)))[0] == 404


async def test_an_answer_under_way_outlives_a_swap(tmp_path, publisher):
    big = {"w": torch.ones(16 << 20)}  # more than sockets take at once
    meta = publisher.publish(1, big.items())
    async with serving_weights(tmp_path) as served:
        await publish(served, 1, meta)
        async with served.http.get(served.url + held(1, "t-00000")) as answer:
            await publish(served, 2, publisher.publish(2, {"w": torch.zeros(16 << 20)}.items()))
            assert await answer.read() == big["w"].view(torch.uint8).numpy().tobytes()


# Shutdown of a real process.


async def test_sigterm_ends_a_server_that_waits_for_a_publisher(tmp_path, publisher):
    ready = tmp_path / "ready.json"
    config = {
        "model": {"path": "x"},
        "backend": {"type": "fake"},
        "service": {"port": 0, "ready_file": str(ready)},
        "weights": {"allow": [str(tmp_path / "weights")]},
    }
    (tmp_path / "server.yaml").write_text(yaml.safe_dump(config))
    argv = [sys.executable, "-m", "inference_server", "--config", str(tmp_path / "server.yaml")]
    server = start_process(ProcessSpec("server", argv, tmp_path / "log", {}, ready))
    try:
        url = await asyncio.to_thread(server.wait_ready, DEADLINE_S * 3)
        wanted = order(1, publisher.announce(1))
        async with aiohttp.ClientSession() as session:
            preparing = asyncio.create_task(session.post(url + paths.WEIGHTS_PREPARE, json=wanted))
            await _until_heard_of(session, url)
            server.signal(signal.SIGTERM)
            answer = await preparing
            code = (await answer.json())["code"]
            assert (answer.status, code) == (503, "draining")
        await asyncio.to_thread(server.wait, DEADLINE_S)
    finally:
        server.stop(1.0)


async def _until_heard_of(session: aiohttp.ClientSession, url: str) -> None:
    """Until the server has heard of epoch 1: an older one is fenced."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            probe = {"epoch": 0, "version": 9}
            async with session.post(url + paths.WEIGHTS_ABORT, json=probe) as answer:
                if answer.status == 409:
                    return
