"""The newest version of somebody else's store, and what a gateway does about it."""

from __future__ import annotations

import asyncio
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from prometheus_client import CollectorRegistry

from gateway.app.followed_objects import FollowedObjects
from gateway.app.followed_store import FollowedStore, newest_version
from headway.contracts.config.gateway import FollowConfig
from headway.contracts.errors import ConfigError, DataError, ServiceAway, SyncError
from headway.dialects.sglang.pulled_checkpoints import PulledCheckpoints
from headway.dialects.sglang.types import PullBody
from tests.unit.weight_sync.foreign_store import ForeignStore, upload
from tests.waiting import eventually

START = {"w": torch.zeros(2)}


def test_the_newest_version_is_what_latest_names(tmp_path):
    assert newest_version(tmp_path) is None
    store = ForeignStore(tmp_path / "run-1", START)
    store.publish(START)
    second = store.publish(START)
    store.folder(3).mkdir()  # its index is not there yet
    assert newest_version(store.root) == second
    (store.root / "latest").write_text("weight_v000001\n")
    assert newest_version(store.root) == store.folder(1)
    (store.root / "latest").write_text("weight_v000009")
    assert newest_version(store.root) is None  # it is not here yet
    (store.root / "latest").unlink()
    assert newest_version(store.root) == second
    (tmp_path / "latest").write_text("run-1/weight_v000002")
    assert newest_version(tmp_path) == second
    (store.root / "latest").write_text("/weight_v000002")
    assert newest_version(store.root) == second, "it leads nowhere else"
    for text in ("../run-1/weight_v000002", "/etc/weight_v1", "newest", ""):
        (tmp_path / "latest").write_text(text)
        with pytest.raises(DataError, match="latest"):
            newest_version(tmp_path)


class Published:
    """`ForeignWeights`, as far as it matters here; refuses what it is told to."""

    def __init__(self) -> None:
        self.newest_path: str | None = None
        self.labels: list[str | None] = []
        self.refused = 0
        self.is_torn = False

    async def publish(self, updates: Any, path: str, label: str | None, aborts: bool) -> str:
        if self.is_torn:
            self.refused += 1
            raise SyncError("torn")
        self.newest_path = path
        self.labels.append(label)
        return str(label)


def followed(place: object, weights: Published) -> FollowedStore:
    config = FollowConfig(path=str(place), interval_s=0.01)
    return FollowedStore(config, weights, None, CollectorRegistry())  # type: ignore[arg-type]


async def test_each_version_is_published_once_and_a_torn_one_until_it_is_mended(tmp_path: Path):
    store, weights = ForeignStore(tmp_path / "store", START), Published()
    follow = followed(store.root, weights)
    await follow.look()
    store.publish({"w": torch.ones(2)})
    await follow.look()
    await follow.look()
    assert weights.labels == ["1"]
    weights.is_torn = True
    store.publish({"w": torch.zeros(2)})
    for _ in range(2):
        with pytest.raises(SyncError, match="torn"):
            await follow.look()
    weights.is_torn = False
    await follow.look()
    assert (weights.labels, weights.refused) == (["1", "2"], 2)


async def test_a_run_that_writes_the_same_number_again_is_noticed(tmp_path: Path):
    store, weights = ForeignStore(tmp_path / "store", START), Published()
    store.publish({"w": torch.ones(2)})
    follow = followed(store.root, weights)
    await follow.look()
    shutil.rmtree(store.root)
    again = ForeignStore(tmp_path / "store", START)
    again.publish({"w": torch.full((2,), 2.0)})
    await follow.look()
    await follow.look()
    assert weights.labels == ["1", "1"]
    restarted = followed(again.root, weights)
    await restarted.look()
    assert weights.labels == ["1", "1"], "it is taken for what was published"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """An object store of this process, which is empty."""
    return f"memory://{tmp_path.name}/run"


async def test_the_newest_version_of_an_object_store_is_what_latest_names(tmp_path: Path, url: str):
    store, objects = ForeignStore(tmp_path, START), FollowedObjects(url)
    assert await objects.newest() == (None, None)
    first = upload(store.publish({"w": torch.ones(2)}), url)
    second = upload(store.publish({"w": torch.zeros(2)}), url)
    newest, identity = await objects.newest()
    assert newest == second and identity is not None
    upload(store.folder(2), url)
    assert await objects.newest() != (second, identity), "it was written again"
    memory = fsspec.filesystem("memory")
    for text, wanted in (("weight_v000001\n", first), ("weight_v000009", None)):
        memory.pipe_file(f"{url}/latest", text.encode())
        assert (await objects.newest())[0] == wanted
    for text in ("../run/weight_v000002", "newest", "", "x" * 600):
        memory.pipe_file(f"{url}/latest", text.encode())
        with pytest.raises(DataError, match="latest"):
            await objects.newest()
    memory.rm_file(f"{url}/latest")
    memory.pipe_file(f"{url}/weight_v000003/config.json", b"its index is not there yet")
    assert (await objects.newest())[0] == second
    above = url.removesuffix("/run")
    memory.pipe_file(f"{above}/latest", b"run/weight_v000001")
    assert (await FollowedObjects(above).newest())[0] == first


async def test_versions_of_an_object_store_are_published(tmp_path: Path, url: str):
    store, weights = ForeignStore(tmp_path, START), Published()
    follow = followed(url, weights)
    await follow.look()
    for value in (1.0, 2.0):
        place = upload(store.publish({"w": torch.full((2,), value)}), url)
        await follow.look()
        await follow.look()
    assert (weights.labels, weights.newest_path) == (["1", "2"], place)
    upload(store.folder(2), url)
    await follow.look()
    assert weights.labels == ["1", "2", "2"]


async def test_a_store_that_is_away_is_said_once_and_asked_again(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    asked: list[int] = []

    def fail(*_: Any, **__: Any) -> None:
        asked.append(1)
        raise RuntimeError("no route")

    upload(ForeignStore(tmp_path, START).publish({"w": torch.ones(2)}), url)
    weights = Published()
    follow = followed(url, weights)
    with monkeypatch.context() as away:
        away.setattr(type(fsspec.filesystem("memory")), "info", fail)
        task = asyncio.create_task(follow.run())
        await asyncio.to_thread(eventually, lambda: len(asked) > 3)
        assert follow.failure is not None and "no route" in follow.failure
    await asyncio.to_thread(eventually, lambda: weights.labels and follow.failure is None)
    task.cancel()
    assert [record.message for record in caplog.records].count("not published") == 1


async def test_a_defect_is_no_outage(url: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", None)
    with pytest.raises(TypeError):
        await FollowedObjects(url).newest()


async def test_a_store_that_hangs_is_asked_by_one_thread_alone(
    url: str, monkeypatch: pytest.MonkeyPatch
):
    answers, asked = threading.Event(), []

    def hang(*_: Any, **__: Any) -> None:
        asked.append(1)
        answers.wait(10.0)
        raise FileNotFoundError

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "info", hang)
    objects = FollowedObjects(url, timeout_s=0.05)
    began = time.monotonic()
    for _ in range(3):
        with pytest.raises(ServiceAway, match=r"did not answer within 0\.05 s"):
            await objects.newest()
    assert len(asked) == 1 and time.monotonic() - began < 5.0
    answers.set()
    await asyncio.to_thread(lambda: eventually(lambda: objects._look and objects._look.done()))
    assert await objects.newest() == (None, None)


def test_a_version_of_an_object_store_is_pulled_by_its_url(url: str):
    pulled = PulledCheckpoints("/start")
    body = {"local_checkpoint_dir": "/local", "source_dir": f"{url}/", "target_version": 2}
    assert pulled.pull(PullBody.model_validate(body)) == f"{url}/weight_v000002"
    assert pulled.place_of("/local") == f"{url}/weight_v000002"


def test_what_reads_a_url_must_be_installed(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigError, match="cannot be opened: Protocol not known: nowhere"):
        followed("nowhere://bucket/run", Published())
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match="pip install fsspec"):
        followed("memory://run", Published())
