"""Weights of a GPU: their sums, their copies for the host, and handles to their memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from headway.contracts.config.weight_sync import CollectiveSync
from headway.contracts.types import GroupRank
from tests.unit.weight_sync.collective_child import Child, Receive, fact, weights
from weight_sync.device_copy import buckets_on_host
from weight_sync.gpu_checksum import ROW_BYTES, multilinear_checksums
from weight_sync.manifest import has_checksum
from weight_sync.published_tensors import buckets
from weight_sync.transports.collective import CHANNEL
from weight_sync.transports.handles import check_reachable, location_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, there is none"),
]
FACTS = {name: fact(tensor) for name, tensor in weights().items()}


@pytest.mark.parametrize("size", [0, 1, 5, ROW_BYTES - 1, ROW_BYTES, 100 * ROW_BYTES + 3])
def test_a_gpu_comes_to_the_checksum_of_the_host(size: int) -> None:
    content = torch.randint(0, 256, (size,), dtype=torch.uint8)
    (checksum,) = multilinear_checksums([content.cuda()])
    assert multilinear_checksums([content]) == [checksum]
    assert has_checksum(content.cuda(), checksum)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), content]).cuda()[1:]
    assert has_checksum(shifted, checksum)


def test_buckets_come_to_pinned_memory_bit_for_bit() -> None:
    given = weights()
    ready = buckets(((name, tensor.cuda()) for name, tensor in given.items()), 1 << 20)
    found = {}
    for bucket in buckets_on_host(ready):
        assert all(tensor.is_pinned() for _, tensor in bucket if tensor.numel())
        found |= {name: fact(tensor) for name, tensor in bucket}
    assert found == FACTS


@pytest.fixture
def child() -> Iterator[Child]:
    """A server that sees the trainer's GPU, under whatever number."""
    with Child(0) as made:
        yield made


def test_every_bit_arrives_by_handles_to_a_gpus_memory(child: Child) -> None:
    config = CollectiveSync(backend="ipc", shard_bytes=1 << 20, timeout_s=30.0)
    publisher = CHANNEL.make_publisher(config)
    check_reachable(location_of(torch.device("cuda", 0)))
    for version in (1, 2, 3):
        path = publisher.announce(version).path
        child.tell(Receive(path, version, GroupRank(version, 1, 2)))
        on_gpu = ((name, tensor.cuda(0)) for name, tensor in weights().items())
        digest = publisher.publish(version, on_gpu).digest
        assert child.heard() == ("done", digest, FACTS)
    publisher.close()


def test_a_server_that_sees_no_gpu_is_refused_by_name() -> None:
    publisher = CHANNEL.make_publisher(CollectiveSync(backend="ipc", timeout_s=30.0))
    path = publisher.announce(1).path
    with Child() as blind:
        blind.tell(Receive(path, 1, GroupRank(1, 1, 2)))
        kind, code, message = blind.heard()
    assert (kind, code) == ("failed", "sync")
    assert "this server sees none" in message
    publisher.close()
