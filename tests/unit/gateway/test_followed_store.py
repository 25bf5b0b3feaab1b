"""The newest version of somebody else's store, and what a gateway does about it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry

from gateway.app.followed_store import FollowedStore, newest_version
from headway.contracts.config.gateway import FollowConfig
from headway.contracts.errors import DataError, SyncError
from tests.unit.weight_sync.foreign_store import ForeignStore

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


def followed(store: ForeignStore, weights: Published) -> FollowedStore:
    config = FollowConfig(path=str(store.root))
    return FollowedStore(config, weights, None, CollectorRegistry())  # type: ignore[arg-type]


async def test_each_version_is_published_once_and_a_torn_one_until_it_is_mended(tmp_path: Path):
    store, weights = ForeignStore(tmp_path / "store", START), Published()
    follow = followed(store, weights)
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
    follow = followed(store, weights)
    await follow.look()
    shutil.rmtree(store.root)
    again = ForeignStore(tmp_path / "store", START)
    again.publish({"w": torch.full((2,), 2.0)})
    await follow.look()
    await follow.look()
    assert weights.labels == ["1", "1"]
    restarted = followed(again, weights)
    await restarted.look()
    assert weights.labels == ["1", "1"], "it is taken for what was published"
