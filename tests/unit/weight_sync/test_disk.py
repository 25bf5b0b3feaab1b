"""What a version looks like on a disk."""

import json
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headway.contracts.config.weight_sync import DiskSync, StoredSync
from weight_sync.manifest import MANIFEST_NAME
from weight_sync.publisher import StoredPublisher
from weight_sync.transports.base import make_publisher
from weight_sync.transports.disk import LocalStore

MIB = 1 << 20
LIMIT_S = 60.0


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Callable[..., StoredPublisher]]:
    with ExitStack() as stack:

        def make(**options: object) -> StoredPublisher:
            made = make_publisher(DiskSync(root=str(tmp_path / "weights"), **options))
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.parametrize(
    ("sizes", "num_shards"),
    [([1, 1, 1], 1), ([MIB - 8, 8], 1), ([MIB - 8, 12], 2), ([3 * MIB, 1, 1], 2), ([MIB] * 3, 3)],
)
def test_shards_are_filled_up_to_their_size(publisher, sizes, num_shards):
    weights = {f"w{i}": torch.rand(max(1, size // 4)) for i, size in enumerate(sizes)}
    sizes = [tensor.nbytes for tensor in weights.values()]
    meta = publisher(shard_bytes=MIB).publish(1, weights.items())
    assert len(list(Path(meta.path).glob("shard-*.safetensors"))) == num_shards


def test_a_full_version_is_what_any_engine_loads(publisher):
    weights = {
        "scalar": torch.tensor(2.5),
        "half": torch.rand(3).half(),
        "wide": torch.rand(5, 7),
        "brain": torch.rand(2, 3).bfloat16(),
        "empty": torch.empty(0, 3),
        "big": torch.rand(MIB // 4),
    }
    meta = publisher(shard_bytes=MIB).publish(7, weights.items())
    loaded = {}
    for file in Path(meta.path).glob("*.safetensors"):
        loaded |= load_file(file)
    assert loaded.keys() == weights.keys()
    assert all(loaded[name].equal(tensor) for name, tensor in weights.items())
    assert all(loaded[name].dtype == tensor.dtype for name, tensor in weights.items())


def test_the_manifest_names_every_tensor_and_where_it_lies(publisher):
    weights = {"a": torch.rand(3), "b": torch.rand(2).half()}
    meta = publisher().publish(7, weights.items())
    manifest = json.loads((Path(meta.path) / MANIFEST_NAME).read_text())
    assert (manifest["version"], manifest["kind"], manifest["digest"]) == (7, "full", meta.digest)
    for entry in manifest["tensors"]:
        content = (Path(meta.path) / entry["blob"]).read_bytes()
        stored = content[entry["offset"] : entry["offset"] + entry["size"]]
        assert stored == weights[entry["name"]].numpy().tobytes()
        assert entry["offset"] % weights[entry["name"]].element_size() == 0


def test_nothing_temporary_is_left(publisher):
    meta = publisher(shard_bytes=MIB).publish(7, {"w": torch.rand(MIB)}.items())
    names = sorted(file.name for file in Path(meta.path).iterdir())
    assert names == [
        "announcement.json",
        "manifest.json",
        "part-00000.json",
        "shard-00000.safetensors",
    ]


def test_few_shards_are_held_at_a_time(publisher):
    gathered: list[weakref.ref[object]] = []
    most = 0

    def tensors():
        nonlocal most
        for index in range(24):
            values = np.full(MIB // 4, index, np.float32)
            gathered.append(weakref.ref(values))
            yield f"w{index}", torch.from_numpy(values)
            del values
            most = max(most, sum(ref() is not None for ref in gathered))

    publisher(shard_bytes=MIB).publish(1, tensors())
    assert most <= 8


def test_a_bucket_that_is_slow_to_write_holds_up_no_other(tmp_path):
    last_came = threading.Event()

    class SlowStore(LocalStore):
        def write_blob(self, version, name, pieces):
            if name.startswith("shard-00000"):
                assert last_came.wait(LIMIT_S)
            if name.startswith("shard-00005"):
                last_came.set()
            return super().write_blob(version, name, pieces)

    publisher = StoredPublisher(SlowStore(str(tmp_path)), StoredSync(shard_bytes=MIB))
    weights = {f"w{i}": torch.full((MIB // 4,), float(i)) for i in range(6)}
    publisher.publish(1, weights.items())
    publisher.close()
    assert last_came.is_set()
