"""Versions broadcast over NCCL. Every member needs a GPU of its own: NCCL refuses two on one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch

from headway.contracts.config.weight_sync import CollectiveSync
from headway.contracts.errors import SyncError
from headway.contracts.types import GroupRank
from tests.unit.weight_sync.collective_child import (
    LIMIT_S,
    Child,
    Half,
    Publish,
    Receive,
    fact,
    weights,
)
from weight_sync.transports.collective import CHANNEL
from weight_sync.transports.collective_publisher import CollectivePublisher

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 GPUs with NCCL, there are {NUM_GPUS}"),
]
SHORT_S = 10.0
FACTS = {name: fact(tensor) for name, tensor in weights().items()}


@pytest.fixture
def publisher() -> Iterator[CollectivePublisher]:
    config = CollectiveSync(backend="nccl", shard_bytes=1 << 20, timeout_s=SHORT_S)
    made = CHANNEL.make_publisher(config)
    yield made
    made.close()


@pytest.fixture
def spawn() -> Iterator[Callable[[], Child]]:
    """Members on the GPUs behind the trainer's."""
    gpus = iter(range(1, NUM_GPUS))
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Child(next(gpus)))


def on_gpu() -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor.cuda(0)) for name, tensor in weights().items())


def test_every_bit_arrives_version_after_version(
    publisher: CollectivePublisher, spawn: Callable[[], Child]
) -> None:
    children = [spawn() for _ in range(NUM_GPUS - 1)]
    for version, count in enumerate([1, 1, len(children), 1], start=1):
        path = publisher.announce(version).path
        for rank, child in enumerate(children[:count], start=1):
            child.tell(Receive(path, version, GroupRank(version, rank, count + 1)))
        digest = publisher.publish(version, on_gpu()).digest
        for child in children[:count]:
            assert child.heard() == ("done", digest, FACTS)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize(("joins", "num_parts"), [(False, 0), (True, 0), (True, 4)])
def test_a_receiver_that_dies_or_stops_ends_the_publication_and_the_trainer_goes_on(
    publisher: CollectivePublisher,
    spawn: Callable[[], Child],
    joins: bool,
    num_parts: int,
    ending: signal.Signals,
) -> None:
    child = spawn()
    path = publisher.announce(7).path
    with ThreadPoolExecutor() as pool:
        published = pool.submit(publisher.publish, 7, on_gpu())
        child.tell(Half(path, 7, GroupRank(1, 1, 2), joins, num_parts))
        assert child.heard() == ("holding", "half")
        os.kill(child.pid, ending)
        with pytest.raises(SyncError):
            published.result(LIMIT_S)
    child.kill()
    with Child(1) as other:
        other.tell(Receive(publisher.announce(8).path, 8, GroupRank(2, 1, 2)))
        digest = publisher.publish(8, on_gpu()).digest
        assert other.heard() == ("done", digest, FACTS)


@pytest.mark.parametrize("num_parts", [0, 4])
def test_a_killed_receiver_does_not_kill_the_trainer_over_sockets_either(
    num_parts: int,
) -> None:
    # NVLink and shared memory do not notice a dead peer; sockets do, and torch's watchdog would too.
    sockets = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
    config = CollectiveSync(backend="nccl", shard_bytes=1 << 20, timeout_s=SHORT_S)
    with (
        Child(0, **sockets) as trainer,
        Child(1, **sockets) as doomed,
        Child(1, **sockets) as other,
    ):
        trainer.tell(Publish(config, 7, on_gpu=True))
        _, path = trainer.heard()
        doomed.tell(Half(path, 7, GroupRank(1, 1, 2), True, num_parts))
        assert doomed.heard() == ("holding", "half")
        doomed.kill()
        other.tell(Receive(path, 7, GroupRank(2, 1, 2)))
        assert other.heard()[0] == "done"
        assert trainer.heard()[0] == "done"
        assert trainer.end() == 0
