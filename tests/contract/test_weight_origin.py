"""What a launcher writes into a server's `weights.allow` permits what the trainer announces, whole."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

import pytest

from headway.contracts.config.weight_sync import (
    CollectiveSync,
    DiskSync,
    HttpSync,
    ReceiverConfig,
    SharedMemorySync,
    WeightSyncConfig,
)
from headway.contracts.errors import SyncError
from weight_sync.transports.base import check_allowed, make_publisher


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


LOCAL = [
    "127.0.0.1",
    pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6")),
]


def check_origin(config: WeightSyncConfig) -> str:
    """What is announced is allowed by the origin, and by nothing less; returns where it lies."""
    with closing(make_publisher(config)) as publisher:
        path = publisher.announce(1).path
    check_allowed(path, ReceiverConfig(allow=(config.origin,), peers=False))
    with pytest.raises(SyncError, match="outside"):
        check_allowed(path, ReceiverConfig(allow=("/elsewhere", "http://elsewhere:1"), peers=False))
    return path


@pytest.mark.parametrize("kind", [DiskSync, SharedMemorySync])
def test_a_relative_root_is_allowed_as_an_absolute_one(
    kind: type[DiskSync | SharedMemorySync], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert str(tmp_path) in check_origin(kind(root="weights"))


@pytest.mark.parametrize("host", LOCAL)
def test_a_free_port_is_allowed_before_it_is_known(host: str, tmp_path: Path):
    check_origin(HttpSync(root=str(tmp_path), host=host))
    check_origin(CollectiveSync(host=host))


def test_an_advertised_url_is_allowed_instead_of_the_bound_address(tmp_path: Path):
    config = HttpSync(root=str(tmp_path), host="0.0.0.0", advertise_url="http://trainer:8100")
    assert check_origin(config) == "http://trainer:8100/v00000001"
