"""Versions by handles to the trainer's memory, on one host, and what happens when one of them fails.

The CPU's handles stand for CUDA's: the way is the same but for what opens them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from headway.contracts.config.weight_sync import CollectiveSync
from headway.contracts.errors import SyncError
from headway.contracts.types import GroupRank
from tests.unit.weight_sync.collective_child import (
    LIMIT_S,
    Half,
    Publish,
    Receive,
    Spawn,
    facts,
    receive,
    weights,
)
from weight_sync.deadline import Deadline
from weight_sync.transports import handles
from weight_sync.transports.collective import CHANNEL
from weight_sync.transports.collective_publisher import CollectivePublisher
from weight_sync.transports.handles import (
    Handle,
    MemoryLocation,
    allocate,
    check_reachable,
    location_of,
    open_handle,
)

CONFIG = CollectiveSync(backend="ipc", shard_bytes=1 << 20, timeout_s=LIMIT_S / 2)
CPU = torch.device("cpu")
NUM_PARTS = 9
"""Buckets of `weights()`."""


def open_buffers() -> int:
    """Memory of this process that others can open."""
    links = [os.readlink(file) for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]
    return len({link for link in links if "headway-weights-" in link})


def test_every_bit_arrives_while_members_come_and_go_and_nothing_is_left(spawn: Spawn) -> None:
    before, publisher = open_buffers(), CHANNEL.make_publisher(CONFIG)
    children = [spawn() for _ in range(2)]
    for version, count in enumerate([1, 2, 2], start=7):
        given = weights(seed=version)
        path = publisher.announce(version).path
        assert path.startswith("ipc://")
        for rank, child in enumerate(children[:count], start=1):
            child.tell(Receive(path, version, GroupRank(version, rank, count + 1)))
        meta = publisher.publish(version, given.items())
        for child in children[:count]:
            assert child.heard() == ("done", meta.digest, facts(given))
    assert open_buffers() == before + 2  # buckets, whatever the size of the version
    publisher.close()
    assert open_buffers() == before


def test_a_bucket_that_is_larger_than_those_before_it_arrives(
    make_publisher: Callable[..., CollectivePublisher], pool: ThreadPoolExecutor
) -> None:
    publisher = make_publisher()
    sizes = (1 << 18, 1 << 20, 0, 3, 1 << 21)
    given = {f"t{i}": torch.randn(size) for i, size in enumerate(sizes)}
    path = publisher.announce(7).path
    came = pool.submit(receive, Receive(path, 7, GroupRank(1, 1, 2)), Deadline(LIMIT_S))
    publisher.publish(7, given.items())
    assert came.result(LIMIT_S)[1] == facts(given)


@pytest.mark.parametrize("num_parts", [0, 4, NUM_PARTS])
def test_who_is_killed_is_left_behind_by_the_next_epoch(
    make_publisher: Callable[..., CollectivePublisher],
    spawn: Spawn,
    pool: ThreadPoolExecutor,
    num_parts: int,
) -> None:
    publisher, doomed, fresh = make_publisher(), spawn(), spawn()
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    doomed.tell(Half(path, 7, GroupRank(1, 1, 2), True, num_parts))
    assert doomed.heard() == ("holding", "half")
    doomed.kill()
    fresh.tell(Receive(path, 7, GroupRank(2, 1, 2)))
    digest = published.result(LIMIT_S).digest
    assert fresh.heard() == ("done", digest, facts(weights()))


def test_a_stopped_member_ends_the_publication_within_its_time(
    make_publisher: Callable[..., CollectivePublisher], spawn: Spawn, pool: ThreadPoolExecutor
) -> None:
    publisher, stopped = make_publisher(timeout_s=4.0), spawn()
    stopped.tell(Half(publisher.announce(7).path, 7, GroupRank(1, 1, 2), True, 4))
    published = pool.submit(publisher.publish, 7, weights().items())
    assert stopped.heard() == ("holding", "half")
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(SyncError, match="no progress"):
        published.result(LIMIT_S)
    os.kill(stopped.pid, signal.SIGCONT)


def test_a_killed_trainer_is_noticed_at_once(spawn: Spawn) -> None:
    trainer, child = spawn(), spawn()
    trainer.tell(Publish(CONFIG, 7, hold_at="big.5"))
    _, path = trainer.heard()
    child.tell(Receive(path, 7, GroupRank(1, 1, 2)))
    assert trainer.heard() == ("holding", "big.5")
    trainer.kill()
    assert child.heard()[:2] == ("failed", "sync")
    assert child.end() == 0


def test_memory_has_a_handle_for_others_and_goes_with_its_last_holder() -> None:
    before, memory = open_buffers(), allocate(64, CPU)
    told = Handle.model_validate_json(memory.export().model_dump_json())
    opened = open_handle(told)
    memory.tensor.fill_(8)
    assert opened.tolist() == [8] * 64
    del memory
    assert opened.tolist() == [8] * 64
    del opened
    assert open_buffers() == before
    with pytest.raises(SyncError, match="cannot be opened"):
        open_handle(told)


def test_what_is_not_the_memory_of_a_handle_is_not_opened(tmp_path: Path) -> None:
    memory, other = allocate(8, CPU), allocate(8, CPU)
    process, _, name, size = memory.export().fields
    with (tmp_path / "file").open("w+") as file:
        for fields in (
            (process, other.descriptor, name, size),
            (process, file.fileno(), name, size),
            (process, "/etc/passwd", name, size),
            (process,),
        ):
            told = memory.export().model_copy(update={"fields": fields})
            with pytest.raises(SyncError, match="cannot be opened"):
                open_handle(told)


def test_a_gpu_that_is_not_seen_and_another_host_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = location_of(CPU)
    check_reachable(here)
    with pytest.raises(SyncError, match=r"another host \(elsewhere.*http or disk"):
        check_reachable(MemoryLocation(host="elsewhere"))
    on_gpu = here.model_copy(update={"gpu": "GPU-7"})
    with pytest.raises(SyncError, match=r"GPU-7, and this server sees none.*shared_memory"):
        check_reachable(on_gpu)
    monkeypatch.setattr(handles, "_visible", lambda: {"GPU-3": 0, "GPU-7": 1})
    check_reachable(on_gpu)  # under whatever number


def test_a_server_that_cannot_reach_the_memory_takes_no_part(
    make_publisher: Callable[..., CollectivePublisher], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = make_publisher()
    path = publisher.announce(7).path
    monkeypatch.setattr(handles, "_BOOT_ID", Path("/nowhere"))
    with pytest.raises(SyncError, match="on another host"):
        receive(Receive(path, 7, GroupRank(1, 1, 2)), Deadline(LIMIT_S))
    assert publisher._rendezvous.plan(7) is None
