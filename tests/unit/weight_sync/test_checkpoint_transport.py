"""Versions that our publisher writes for engines that are not ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.contracts.config.weight_sync import CheckpointSync, DeltaConfig, ReceiverConfig
from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import WeightUpdateMeta
from headway.runtime.config import validate_config
from tests.unit.weight_sync.foreign_store import Tensors, read_store
from weight_sync.checkpoint_deltas import INDEX_NAME
from weight_sync.deadline import Deadline
from weight_sync.receiver import make_receiver
from weight_sync.transports.base import make_publisher
from weight_sync.transports.checkpoint import CheckpointPublisher

MIB = 1 << 20


def weights(seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(300_000, generator=generator),
        "norm": torch.randn(7, generator=generator).bfloat16(),
        "fixed": torch.ones(3, 2),
        "scalar": torch.tensor(float(seed)),
    }


def opened(root: Path, **settings: Any) -> CheckpointPublisher:
    config = CheckpointSync(root=str(root), shard_bytes=MIB, **settings)
    publisher = make_publisher(config)
    assert isinstance(publisher, CheckpointPublisher)
    return publisher


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def publisher(root: Path) -> Iterator[CheckpointPublisher]:
    with closing(opened(root, delta=DeltaConfig(full_every=3))) as opened_one:
        yield opened_one


def is_equal(found: Any, wanted: Tensors) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[name], wanted[name]) and found[name].dtype == wanted[name].dtype
        for name in wanted
    )


def index_of(root: Path, version: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"weight_v{version:06d}" / INDEX_NAME).read_text())
    return found


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32"])
def test_another_reader_finds_every_bit(root, encoding, checksum):
    settings = {"encoding": encoding, "checksum": checksum, "delta": DeltaConfig(full_every=3)}
    with closing(opened(root, **settings)) as publisher:
        for version in range(1, 6):
            publisher.publish(version, weights(version).items())
            assert (root / "latest").read_text() == f"weight_v{version:06d}"
            assert is_equal(read_store(root, version, {}), weights(version))
        assert publisher.latest() == 5
    bases = [index_of(root, v)["metadata"].get("base_version") for v in range(1, 6)]
    assert bases == [None, "000001", "000002", None, "000004"]
    changed = index_of(root, 2)["weight_map"]
    assert set(changed) == set(weights(2)) - {"fixed"} and len(set(changed.values())) > 1


def test_a_server_waits_for_what_was_announced(root, publisher):
    config = ReceiverConfig(allow=(str(root),))
    receiver = make_receiver(config)
    expected = {name: tensor.shape for name, tensor in weights(0).items()}
    with ThreadPoolExecutor(1) as pool:
        for version in (3, 4, 5, 6):
            meta = publisher.announce(version)
            staging = pool.submit(receiver.within(Deadline(20.0)).stage, meta, expected)
            published = publisher.publish(version, weights(version).items())
            staged = staging.result(20.0)
            assert is_equal(staged.tensors, weights(version))
            assert (staged.version, staged.digest) == (published.version, published.digest)
            assert published.path == meta.path
            receiver.keep(staged)


def test_what_was_refused_leaves_nothing_and_the_next_one_is_whole(root, publisher):
    publisher.publish(1, weights(1).items())
    meta = publisher.announce(2)
    decision: Future[int] = Future()
    publisher.follow(2, decision)
    decision.set_exception(SyncError("no server wants it"))
    with pytest.raises(SyncError, match="no server wants it"):
        publisher.publish(2, weights(2).items())
    assert not Path(meta.path.removeprefix("model://")).exists()
    assert (root / "latest").read_text() == "weight_v000001"
    publisher.publish(3, weights(3).items())
    assert is_equal(read_store(root, 3, {}), weights(3))
    assert "base_version" not in index_of(root, 3)["metadata"]


def test_values_that_are_not_finite_are_not_published(root, publisher):
    publisher.publish(1, weights(1).items())
    with pytest.raises(SyncError, match="1 of 7 values of norm are NaN"):
        sick = weights(2)
        sick["norm"][3] = float("nan")
        publisher.publish(2, sick.items())
    assert publisher.latest() == 1


def test_old_versions_go_and_their_bases_stay(root, publisher):
    for version in range(1, 9):
        publisher.publish(version, weights(version).items())
    assert publisher.collect(8) == [1, 2, 3]  # 6 is kept, and builds on 5, and that on 4
    for version in (6, 7, 8):
        assert is_equal(read_store(root, version, {}), weights(version))


def test_a_version_is_published_once_by_one_publisher(root, publisher):
    publisher.publish(1, weights(1).items())
    with pytest.raises(SyncError, match="published once"):
        publisher.publish(1, weights(1).items())
    with pytest.raises(SyncError, match="has a publisher already"):
        opened(root)


def test_a_killed_publishers_half_version_goes_with_the_next_publisher(root):
    with closing(opened(root)) as first:
        first.publish(1, weights(1).items())
        first.announce(2)
    with closing(opened(root)) as second:
        assert second.latest() == 1
        assert not (root / "weight_v000002").exists()
        second.publish(2, weights(2).items())
    assert is_equal(read_store(root, 2, {}), weights(2))


@pytest.mark.parametrize("delta", [None, DeltaConfig()])
def test_tensors_may_share_memory(root, delta):
    whole = torch.arange(12.0).view(3, 4)
    shared = {"whole": whole, "row": whole[1], "column": whole[:, 2]}
    with closing(opened(root, delta=delta)) as publisher:
        for version in (1, 2):
            publisher.publish(version, shared.items())
            whole += 1
    wanted = {name: tensor.contiguous() - 1 for name, tensor in shared.items()}
    assert is_equal(read_store(root, 2, {}), wanted)


def test_a_model_that_changes_its_shapes_is_told_so(publisher):
    publisher.publish(1, weights(1).items())
    with pytest.raises(SyncError, match="norm is not what it was in version 1"):
        publisher.publish(2, (weights(2) | {"norm": torch.zeros(9)}).items())


def test_other_engines_find_the_models_files(root, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX_NAME).write_text('{"weight_map": {}}')
    with closing(opened(root, files_from=str(tmp_path), delta=None)) as publisher:
        for version in (1, 2):
            publisher.publish(version, weights(version).items())
            assert (root / f"weight_v{version:06d}" / "config.json").read_text() == "{}"
            assert is_equal(read_store(root, version, {}), weights(version))


def test_quantization_is_ours_alone():
    given = {"type": "checkpoint", "root": "x", "quantization": "int8", "dtype": "bfloat16"}
    with pytest.raises(ConfigError, match="no quantization of ours"):
        validate_config(CheckpointSync, given)


def test_a_stranger_cannot_be_waited_for_without_end(root, publisher):
    meta = publisher.announce(1)
    expected = {name: tensor.shape for name, tensor in weights(0).items()}
    reader = make_receiver(ReceiverConfig(allow=(str(root),))).within(Deadline(0.1))
    with pytest.raises(SyncError, match="no progress"):
        reader.stage(WeightUpdateMeta(1, meta.path), expected)
