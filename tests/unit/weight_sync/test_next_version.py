"""The number that a version gets is above all that were used."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DiskSync,
    HttpSync,
    SharedMemorySync,
    WeightSyncConfig,
)
from weight_sync.publication import next_version
from weight_sync.transports.base import make_publisher


@pytest.mark.parametrize(
    ("restored", "head", "latest", "wanted"),
    [
        (0, 0, None, 1),
        (0, 7, None, 8),  # the service has played another run
        (0, 0, 4, 5),  # the store holds another run
        (5, 5, 5, 6),  # also what the service has seen: its servers may have forgotten it
        (5, 7, 6, 8),  # published after the checkpoint
        (5, 7, None, 8),  # so by a process group
        (5, 0, None, 6),  # the service was set up again, and so was the store
        (0, 5, 6, 7),  # it was stored and refused
    ],
)
def test_a_number_is_used_once(restored: int, head: int, latest: int | None, wanted: int):
    publisher: Any = SimpleNamespace(latest=lambda: latest)
    service: Any = SimpleNamespace(status=lambda: SimpleNamespace(head=head))
    assert next_version(publisher, service, restored) == wanted


@pytest.mark.parametrize("kind", [DiskSync, SharedMemorySync, HttpSync])
def test_a_store_knows_its_latest_version_also_after_a_restart(
    kind: type[DiskSync | SharedMemorySync | HttpSync], tmp_path: Path
):
    config: WeightSyncConfig = kind(root=str(tmp_path / "weights"))
    with closing(make_publisher(config)) as publisher:
        assert publisher.latest() is None
        publisher.publish(3, [("weight", torch.ones(2))])
        publisher.announce(4)  # and then it was killed
    with closing(make_publisher(config)) as publisher:
        assert publisher.latest() == 3


def test_a_process_group_knows_of_nothing_before_its_own():
    with closing(make_publisher(CollectiveSync())) as publisher:
        assert publisher.latest() is None
