"""Directories of an object store, read by a server: what is fetched, what stays, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

from headway.contracts.config.weight_sync import (
    CheckpointSync,
    DeltaConfig,
    DiskSync,
    ReceiverConfig,
)
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from tests.unit.weight_sync.foreign_store import ForeignStore, Tensors, save_start, upload
from weight_sync.deadline import Deadline
from weight_sync.receiver import Receiver, make_receiver
from weight_sync.transports.base import make_publisher

SHARD = "model-00000-of-00001.safetensors"
MEMORY = fsspec.filesystem("memory")


def weights(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {"embed": torch.randn(6, 4, generator=generator).bfloat16(), "fixed": torch.ones(3)}


SHAPES = {name: tensor.shape for name, tensor in weights(0).items()}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"memory://{tmp_path.name}/run"


@pytest.fixture
def store(tmp_path: Path) -> ForeignStore:
    return ForeignStore(tmp_path / "store", weights(0))


@pytest.fixture
def start(tmp_path: Path) -> Path:
    return save_start(tmp_path / "start", weights(0))


@pytest.fixture
def receiver(tmp_path: Path, url: str, start: Path) -> Iterator[Receiver]:
    config = ReceiverConfig(allow=(url,), cache_dir=str(tmp_path / "cache"))
    with closing(make_receiver(config, str(start))) as made:
        yield made


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Files that were fetched, each as often as it was."""
    names: list[str] = []
    get = type(MEMORY).get_file

    def get_file(self: Any, path: str, *args: Any, **options: Any) -> None:
        names.append("/".join(path.split("/")[-2:]))
        get(self, path, *args, **options)

    monkeypatch.setattr(type(MEMORY), "get_file", get_file)
    return names


def stage(receiver: Receiver, url: str, version: int = 9, limit_s: float = 10.0):
    meta = WeightUpdateMeta(version, f"model://{url}")
    return receiver.within(Deadline(limit_s)).stage(meta, SHAPES)


def is_equal(found: Any, wanted: Tensors) -> bool:
    return found.tensors.keys() == wanted.keys() and all(
        torch.equal(found.tensors[name], wanted[name]) for name in wanted
    )


def cached(tmp_path: Path) -> list[str]:
    return sorted(each.name for each in (tmp_path / "cache" / "fetched").glob("*/*"))


def test_each_file_is_fetched_once_and_only_what_is_needed_stays(
    receiver, store, url, fetched, tmp_path
):
    for seed in range(1, 7):
        place = upload(store.publish(weights(seed), is_whole=seed == 3), url)
        receiver.keep(staged := stage(receiver, place, seed))
        assert is_equal(staged, weights(seed))
    assert len(fetched) == len(set(fetched)) == 12
    assert cached(tmp_path) == ["weight_v000005", "weight_v000006"]
    receiver.close()
    assert cached(tmp_path) == []


def test_a_late_server_fetches_no_more_than_from_the_last_whole_version(
    receiver, store, url, fetched
):
    for seed in range(1, 5):
        place = upload(store.publish(weights(seed), is_whole=seed == 2), url)
    assert is_equal(stage(receiver, place), weights(4))
    assert {name.split("/")[0] for name in fetched} == {f"weight_v00000{i}" for i in (2, 3, 4)}


def test_damage_is_refused_and_can_be_repaired(receiver, store, url, fetched):
    receiver.keep(stage(receiver, upload(store.publish(weights(1)), url)))
    place = upload(store.publish(weights(2)), url)
    whole = MEMORY.cat_file(f"{place}/{SHARD}")
    MEMORY.pipe_file(f"{place}/{SHARD}", whole[:-9])
    for _ in range(2):
        with pytest.raises(SyncError, match="weight_v000002 is torn"):
            stage(receiver, place)
    MEMORY.pipe_file(f"{place}/{SHARD}", whole)
    assert is_equal(stage(receiver, place), weights(2))
    assert fetched.count(f"weight_v000002/{SHARD}") == 2, "not again while it is the same"
    MEMORY.rm_file(f"{place}/{SHARD}")
    with pytest.raises(SyncError, match="cannot be read"):
        stage(receiver, place)


def test_a_file_that_does_not_come_whole_is_refused(receiver, store, url, monkeypatch):
    place = upload(store.publish(weights(1)), url)

    def half(_: Any, path: str, target: str, **options: Any) -> None:
        Path(target).write_bytes(MEMORY.cat_file(path)[:-1])

    def away(*_: Any, **__: Any) -> None:
        raise RuntimeError("no route")

    for broken, message in ((half, "is torn: .* bytes came of"), (away, "no route")):
        with monkeypatch.context() as patch:
            patch.setattr(type(MEMORY), "get_file", broken)
            with pytest.raises(SyncError, match=message):
                stage(receiver, place)
    assert is_equal(stage(receiver, place), weights(1))


def test_what_an_earlier_process_left_is_removed(receiver, store, url, tmp_path):
    (tmp_path / "cache" / "fetched" / "memory:" / "weight_v000001").mkdir(parents=True)
    assert is_equal(stage(receiver, upload(store.publish(weights(1)), url)), weights(1))
    assert cached(tmp_path) == ["weight_v000001"]
    assert not (tmp_path / "cache" / "fetched" / "memory:").exists()


def test_a_cache_that_cannot_be_had_is_named(store, url, tmp_path):
    (tmp_path / "file").touch()
    config = ReceiverConfig(allow=(url,), cache_dir=str(tmp_path / "file"))
    with (
        closing(make_receiver(config)) as other,
        pytest.raises(SyncError, match=r"set weights\.cache_dir"),
    ):
        stage(other, upload(store.publish(weights(1), is_whole=True), url))


def test_a_store_that_hangs_is_given_up(receiver, store, url, monkeypatch):
    place, goes_on = upload(store.publish(weights(1)), url), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(type(MEMORY), "get_file", lambda *_, **__: goes_on.wait(10.0))
        with pytest.raises(SyncError, match="no progress"):
            stage(receiver, place, limit_s=0.2)
    goes_on.set()
    assert is_equal(stage(receiver, place), weights(1))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("memory://elsewhere/weight_v000001", "outside"),
        ("URL/../run/weight_v000001", "outside"),
        ("URL2/weight_v000001", "outside"),
        ("URL/x::memory://elsewhere", "neither"),
        ("URL/weight_v000009", "is not a directory"),
        ("http://localhost:9/v1/weights/held/7", "neither"),
    ],
)
def test_only_what_is_allowed_is_read(receiver, store, url, path, message):
    upload(store.publish(weights(1)), url)
    with pytest.raises(SyncError, match=message):
        stage(receiver, path.replace("URL", url))


def test_nothing_is_read_by_default(store, url):
    place = upload(store.publish(weights(1)), url)
    for allow in ((), ("/",), (str(store.root),)):
        with (
            closing(make_receiver(ReceiverConfig(allow=allow))) as stranger,
            pytest.raises(SyncError, match=r"add it to weights\.allow"),
        ):
            stage(stranger, place)


def test_an_index_names_no_files_elsewhere(receiver, store, url, tmp_path):
    save_file(weights(1), tmp_path / "secret.safetensors")
    place = upload(store.publish(weights(1), is_whole=True), url)
    names = '{"weight_map": {"embed": "../../../../secret.safetensors"}}'
    MEMORY.pipe_file(f"{place}/model.safetensors.index.json", names.encode())
    with pytest.raises(SyncError, match="outside"):
        stage(receiver, place)


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_engine_that_reads_files_gets_a_directory(receiver, store, url, is_whole):
    for seed in (1, 2, 3):
        place = upload(store.publish(weights(seed), is_whole), url)
        meta = WeightUpdateMeta(seed, f"model://{place}")
        verified = receiver.within(Deadline(10.0)).verify(meta, SHAPES)
        assert list(verified.folder.glob("*.safetensors"))
        receiver.keep(verified)
        assert list(verified.folder.glob("*.safetensors")), "it stays while it serves"


def test_a_version_of_ours_is_read_with_its_proofs(receiver, url, fetched):
    with closing(make_publisher(DiskSync(root=url))) as publisher:
        place = publisher.publish(7, weights(7).items()).path
    assert is_equal(stage(receiver, place), weights(7))
    assert fetched == ["v00000007/manifest.json"]


def test_our_publisher_writes_it_and_a_server_waits_for_it(receiver, url):
    config = CheckpointSync(root=url, delta=DeltaConfig(full_every=3), keep=2)
    assert config.origin == url
    with closing(make_publisher(config)) as publisher, ThreadPoolExecutor(1) as pool:
        for version in range(1, 8):
            meta = publisher.announce(version)
            staging = pool.submit(receiver.within(Deadline(20.0)).stage, meta, SHAPES)
            published = publisher.publish(version, weights(version).items())
            staged = staging.result(20.0)
            assert is_equal(staged, weights(version))
            assert (staged.digest, meta.path) == (published.digest, published.path)
            receiver.keep(staged)
            assert MEMORY.cat_file(f"{url}/latest") == f"weight_v{version:06d}".encode()
        assert publisher.collect(7) == [1, 2, 3]  # 6 is kept, and builds on 5, and that on 4
        assert publisher.latest() == 7
        with pytest.raises(SyncError, match="published once"):
            publisher.announce(7)
        publisher.announce(8)
    with closing(make_publisher(config)) as again:
        assert again.latest() == 7
        assert not MEMORY.exists(f"{url}/weight_v000008"), "half a version goes"


def test_a_failure_to_write_is_said(url, monkeypatch):
    with closing(make_publisher(CheckpointSync(root=url))) as publisher:
        publisher.publish(1, weights(1).items())

        def away(*_: Any, **__: Any) -> None:
            raise RuntimeError("no route")

        with monkeypatch.context() as patch:
            patch.setattr(type(MEMORY), "pipe_file", away)
            with pytest.raises(SyncError, match=r"cannot write version 2 to .*no route"):
                publisher.publish(2, weights(2).items())
        with monkeypatch.context() as patch:
            patch.setattr(type(MEMORY), "ls", away)
            for read in (publisher.latest, lambda: publisher.publish(2, weights(2).items())):
                with pytest.raises(SyncError, match=r"cannot read .*no route"):
                    read()
        publisher.publish(2, weights(2).items())
        assert publisher.latest() == 2
