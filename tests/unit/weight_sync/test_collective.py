"""Versions broadcast over Gloo between real processes, and what happens when one of them fails."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.contracts.config.weight_sync import CollectiveSync, ReceiverConfig
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import GroupRank, WeightUpdateMeta
from tests.contract.weight_channel_suite import refusal
from tests.unit.weight_sync.collective_child import (
    LIMIT_S,
    Child,
    Engine,
    Half,
    Publish,
    Receive,
    Spawn,
    fact,
    facts,
    receive,
    weights,
)
from weight_sync.buffers import Buffers
from weight_sync.deadline import Deadline
from weight_sync.manifest import tensor_checksum
from weight_sync.transports.collective import CHANNEL
from weight_sync.transports.collective_publisher import CollectivePublisher
from weight_sync.transports.participant import Participant

SHORT_S = 2.0
CONFIG = CollectiveSync(shard_bytes=1 << 20, timeout_s=LIMIT_S / 2)
NUM_PARTS = 9
"""Buckets of `weights()`."""


@pytest.fixture
def publisher(make_publisher: Callable[..., CollectivePublisher]) -> CollectivePublisher:
    return make_publisher()


def held_groups(epoch: int, count: int) -> list[GroupRank]:
    return [GroupRank(epoch, rank, count + 1) for rank in range(1, count + 1)]


def send(children: list[Child], path: str, version: int, epoch: int) -> None:
    for child, group_rank in zip(children, held_groups(epoch, len(children)), strict=True):
        child.tell(Receive(path, version, group_rank))


def in_thread(
    pool: ThreadPoolExecutor, path: str, group_rank: GroupRank, deadline: Deadline
) -> Future[tuple[str, dict[str, str]]]:
    return pool.submit(receive, Receive(path, 7, group_rank), deadline)


def test_every_bit_arrives_at_whoever_takes_part_while_members_come_and_go(
    publisher: CollectivePublisher, spawn: Spawn
) -> None:
    children = [spawn() for _ in range(3)]
    for version, count in enumerate([1, 3, 3, 1], start=7):
        given = weights(seed=version)
        path = publisher.announce(version).path
        send(children[:count], path, version, epoch=version)
        meta = publisher.publish(version, given.items())
        for child in children[:count]:
            assert child.heard() == ("done", meta.digest, facts(given))
        assert publisher.latest() == version
        assert publisher.collect(version) == []


def test_a_group_lasts_as_long_as_its_members_do(
    publisher: CollectivePublisher, spawn: Spawn
) -> None:
    first, second = spawn(), spawn()
    names = []
    for version, members in enumerate([(first, second), (first, second), (second, first)], start=1):
        path = publisher.announce(version).path
        send(list(members), path, version, epoch=10 + version)
        publisher.publish(version, weights().items())
        assert {child.heard()[0] for child in members} == {"done"}
        assert publisher._group is not None
        names.append(publisher._group.address.name)
    assert names == ["v00000001-11", "v00000001-11", "v00000003-13"]


def test_a_trainer_with_a_default_group_of_its_own_publishes(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        path = publisher.announce(7).path
        came = in_thread(pool, path, GroupRank(1, 1, 2), Deadline(LIMIT_S))
        publisher.publish(7, weights().items())
        assert came.result(LIMIT_S)[1] == facts(weights())
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("quantization", ["int8", "float8_e4m3fn"])
def test_quantized_weights_have_the_digest_of_what_receivers_end_up_with(
    make_publisher: Callable[..., CollectivePublisher], pool: ThreadPoolExecutor, quantization: str
) -> None:
    publisher = make_publisher(quantization=quantization)
    given = {"m": torch.randn(33, 65), "bias": torch.randn(7), "n": torch.randn(9, 17).bfloat16()}
    path = publisher.announce(7).path
    came = in_thread(pool, path, GroupRank(1, 1, 2), Deadline(LIMIT_S))
    meta = publisher.publish(7, given.items())
    digest, found = came.result(LIMIT_S)
    assert digest == meta.digest
    assert found["bias"] == fact(given["bias"])
    assert found["m"] != fact(given["m"])


@pytest.mark.parametrize("num_parts", [0, 4])
def test_who_is_killed_in_the_group_ends_the_epoch_and_the_others_take_the_version_in_the_next(
    publisher: CollectivePublisher, spawn: Spawn, pool: ThreadPoolExecutor, num_parts: int
) -> None:
    doomed, *others = spawn(), spawn(), spawn()
    path = publisher.announce(7).path
    gathered = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights().items():
            gathered.append(name)
            yield name, tensor

    published = pool.submit(publisher.publish, 7, gather())
    doomed.tell(Half(path, 7, GroupRank(1, 3, 4), joins=True, num_parts=num_parts))
    for child, rank in zip(others, (1, 2), strict=True):
        child.tell(Receive(path, 7, GroupRank(1, rank, 4)))
    assert doomed.heard() == ("holding", "half")
    doomed.kill()
    # Its connections tell the others; nobody waits for a deadline.
    assert {child.heard()[0] for child in others} == {"failed"}
    send(others, path, 7, epoch=2)
    digest = published.result(LIMIT_S).digest
    assert [child.heard() for child in others] == [("done", digest, facts(weights()))] * 2
    assert gathered == list(weights())


@pytest.mark.parametrize(("joins", "num_parts"), [(False, 0), (True, NUM_PARTS)])
def test_who_is_killed_outside_of_a_broadcast_is_left_behind_by_the_next_epoch(
    publisher: CollectivePublisher,
    spawn: Spawn,
    pool: ThreadPoolExecutor,
    joins: bool,
    num_parts: int,
) -> None:
    doomed, other, fresh = spawn(), spawn(), spawn()
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    doomed.tell(Half(path, 7, GroupRank(1, 2, 3), joins, num_parts))
    other.tell(Receive(path, 7, GroupRank(1, 1, 3)))
    assert doomed.heard() == ("holding", "half")
    doomed.kill()
    fresh.tell(Receive(path, 7, GroupRank(2, 1, 2)))
    digest = published.result(LIMIT_S).digest
    assert fresh.heard() == ("done", digest, facts(weights()))
    if joins:
        assert other.heard() == ("done", digest, facts(weights()))
    else:
        assert other.heard()[:2] == ("failed", "fenced")


def test_a_version_that_all_have_can_be_asked_for_again_until_the_service_has_decided(
    publisher: CollectivePublisher, spawn: Spawn, pool: ThreadPoolExecutor
) -> None:
    doomed, other = spawn(), spawn()
    path = publisher.announce(7).path
    decision: Future[int] = Future()
    publisher.follow(7, decision)
    published = pool.submit(publisher.publish, 7, weights().items())
    send([other, doomed], path, 7, epoch=1)
    assert [child.heard()[0] for child in (other, doomed)] == ["done", "done"]
    doomed.kill()  # its answer is lost, so the service asks the other again
    other.tell(Receive(path, 7, GroupRank(2, 1, 2)))
    kind, digest, found = other.heard()
    assert (kind, found) == ("done", facts(weights()))
    assert not published.done()
    decision.set_result(7)
    assert published.result(LIMIT_S).digest == digest
    with pytest.raises(SyncError, match="brought to all its members"):
        receive(Receive(path, 7, GroupRank(3, 1, 2)), Deadline(LIMIT_S))


def test_a_version_that_is_held_is_given_up_when_the_service_refuses_it(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    path = publisher.announce(7).path
    decision: Future[int] = Future()
    publisher.follow(7, decision)
    came = in_thread(pool, path, GroupRank(1, 1, 2), Deadline(LIMIT_S))
    published = pool.submit(publisher.publish, 7, weights().items())
    came.result(LIMIT_S)
    decision.set_exception(SyncError("no quorum"))
    with pytest.raises(SyncError, match="no quorum"):
        published.result(LIMIT_S)


@pytest.mark.parametrize("num_parts", [0, 4, NUM_PARTS])
def test_a_stopped_receiver_ends_the_publication_within_its_time(
    make_publisher: Callable[..., CollectivePublisher],
    spawn: Spawn,
    pool: ThreadPoolExecutor,
    num_parts: int,
) -> None:
    publisher = make_publisher(timeout_s=SHORT_S)
    stopped, other = spawn(), spawn()
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    other.tell(Receive(path, 7, GroupRank(1, 1, 3)))
    stopped.tell(Half(path, 7, GroupRank(1, 2, 3), True, num_parts))
    assert stopped.heard() == ("holding", "half")
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(SyncError):
        published.result(LIMIT_S)
    answer = other.heard()
    if num_parts < NUM_PARTS:
        assert answer[0] == "failed"
    os.kill(stopped.pid, signal.SIGCONT)
    path = publisher.announce(8).path  # the publisher is none the worse
    other.tell(Receive(path, 8, GroupRank(2, 1, 2)))
    publisher.publish(8, weights().items())
    assert other.heard()[0] == "done"


def test_a_killed_publisher_is_noticed_at_once(spawn: Spawn) -> None:
    trainer, *receivers = spawn(), spawn(), spawn()
    trainer.tell(Publish(CONFIG, 7, hold_at="big.5"))
    _, path = trainer.heard()
    send(receivers, path, 7, epoch=1)
    assert trainer.heard() == ("holding", "big.5")
    trainer.kill()
    for child in receivers:
        kind, code, _ = child.heard()
        assert (kind, code) == ("failed", "sync")
        assert child.end() == 0


@pytest.mark.extended
@pytest.mark.parametrize("hold_at", ["odd.bf16", "big.5"])
def test_a_wait_for_a_stopped_publisher_ends(
    spawn: Spawn, pool: ThreadPoolExecutor, hold_at: str
) -> None:
    trainer, child = spawn(), spawn()
    trainer.tell(Publish(CONFIG, 7, hold_at))
    _, path = trainer.heard()
    child.tell(Receive(path, 7, GroupRank(1, 1, 2), SHORT_S))
    assert trainer.heard() == ("holding", hold_at)
    os.kill(trainer.pid, signal.SIGSTOP)
    kind, _, message = child.heard()
    assert kind == "failed"
    assert "no progress" in message
    assert child.end() == 0  # whatever still waits holds up nobody
    late = in_thread(pool, path, GroupRank(2, 1, 2), Deadline(SHORT_S))  # cannot even connect
    with pytest.raises(SyncError):
        late.result(LIMIT_S)
    trainer.kill()


def test_giving_up_while_the_others_have_not_come(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    path = publisher.announce(7).path
    deadline = Deadline(LIMIT_S)
    waiting = in_thread(pool, path, GroupRank(1, 1, 3), deadline)
    deadline.cancel("the server was told otherwise")
    with pytest.raises(SyncError, match="told otherwise"):
        waiting.result(LIMIT_S)


def test_giving_up_in_a_broadcast_leaves_a_process_that_can_go_on(
    publisher: CollectivePublisher, spawn: Spawn, pool: ThreadPoolExecutor
) -> None:
    slow = spawn()
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    slow.tell(Half(path, 7, GroupRank(1, 2, 3), joins=True, num_parts=2))
    deadline = Deadline(LIMIT_S)
    waiting = in_thread(pool, path, GroupRank(1, 1, 3), deadline)
    assert slow.heard() == ("holding", "half")  # it takes no more, so nobody gets what comes then
    deadline.cancel("the server was told otherwise")
    with pytest.raises(SyncError, match="told otherwise"):
        waiting.result(LIMIT_S)
    again = in_thread(pool, path, GroupRank(2, 1, 2), Deadline(LIMIT_S))
    assert again.result(LIMIT_S)[0] == published.result(LIMIT_S).digest


def test_a_reader_who_leaves_early_ends_it_for_all(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    other = in_thread(pool, path, GroupRank(1, 2, 3), Deadline(LIMIT_S))
    meta = WeightUpdateMeta(7, path, group_rank=GroupRank(1, 1, 3))
    source = CHANNEL.open_source(path, meta, ReceiverConfig(), Deadline(LIMIT_S))
    next(iter(source.entries()))
    source.close()
    with pytest.raises(SyncError, match="rank 1 left"):
        other.result(LIMIT_S)
    publisher.follow(7, refusal("nobody is left"))
    with pytest.raises(SyncError):
        published.result(LIMIT_S)


def test_the_gateway_refuses_and_the_publication_ends(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    publisher.announce(7)
    begun, gathered = threading.Event(), weights()

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        begun.set()
        yield from gathered.items()

    published = pool.submit(publisher.publish, 7, gather())
    assert begun.wait(LIMIT_S)
    publisher.follow(7, refusal("no server is ready"))
    with pytest.raises(SyncError, match="no server is ready"):
        published.result(LIMIT_S)
    assert publisher.latest() is None


def test_a_cancelled_version_is_not_begun_and_its_receivers_are_told(
    publisher: CollectivePublisher,
) -> None:
    path = publisher.announce(7).path
    publisher.follow(7, refusal("no server is ready"))
    with pytest.raises(SyncError, match="no server is ready"):
        publisher.publish(7, weights().items())
    with pytest.raises(SyncError, match="given up"):
        receive(Receive(path, 7, GroupRank(1, 1, 2)), Deadline(LIMIT_S))


def test_a_gathering_that_fails_ends_everything(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights().items()
        raise ZeroDivisionError("a shard is gone")

    path = publisher.announce(7).path
    came = in_thread(pool, path, GroupRank(1, 1, 2), Deadline(LIMIT_S))
    with pytest.raises(ZeroDivisionError):
        publisher.publish(7, gather())
    with pytest.raises(SyncError, match="a shard is gone"):
        came.result(LIMIT_S)


def test_a_newer_epoch_supersedes_one_that_is_under_way(
    publisher: CollectivePublisher, spawn: Spawn, pool: ThreadPoolExecutor
) -> None:
    old = spawn()
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    old.tell(Receive(path, 7, GroupRank(4, 1, 2), hold_at="big.1"))
    assert old.heard() == ("holding", "big.1")
    new = in_thread(pool, path, GroupRank(5, 1, 2), Deadline(LIMIT_S))
    assert new.result(LIMIT_S)[0] == published.result(LIMIT_S).digest
    old.tell("go on")
    assert old.heard()[:2] == ("failed", "fenced")


def test_a_stale_epoch_is_fenced_and_a_contradiction_refused(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    path = publisher.announce(7).path
    Participant(path, 7, GroupRank(5, 1, 3), Deadline(LIMIT_S))
    with pytest.raises(Fenced, match="superseded by epoch 5"):
        receive(Receive(path, 7, GroupRank(4, 1, 2)), Deadline(LIMIT_S))
    with pytest.raises(SyncError, match="3 members in epoch 5, not for 2"):
        receive(Receive(path, 7, GroupRank(5, 1, 2)), Deadline(LIMIT_S))


def test_what_is_over_cannot_be_joined(
    publisher: CollectivePublisher, pool: ThreadPoolExecutor
) -> None:
    path = publisher.announce(7).path
    came = in_thread(pool, path, GroupRank(1, 1, 2), Deadline(LIMIT_S))
    publisher.publish(7, weights().items())
    came.result(LIMIT_S)
    with pytest.raises(SyncError, match="brought to all its members"):
        receive(Receive(path, 7, GroupRank(2, 1, 2)), Deadline(LIMIT_S))
    with pytest.raises(SyncError, match="not newer than 7"):
        publisher.announce(7)
    publisher.announce(8)
    with pytest.raises(SyncError, match="no version 7"):
        receive(Receive(path, 7, GroupRank(3, 1, 2)), Deadline(LIMIT_S))


def test_an_address_without_a_trainer_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(SyncError, match="no trainer at"):
        path = f"gloo://127.0.0.1:{port}/v00000007"
        receive(Receive(path, 7, GroupRank(1, 1, 2)), Deadline(LIMIT_S))
    with pytest.raises(SyncError, match="names no rendezvous"):
        receive(Receive("gloo://v00000007", 7, GroupRank(1, 1, 2)), Deadline(LIMIT_S))


CONNECTING = """
import sys
from weight_sync.transports import daemon_calls, rendezvous
daemon_calls.EXIT_S = 1.0
daemon_calls.start_detached(lambda: rendezvous.connect("127.0.0.1", int(sys.argv[1])))
while not daemon_calls._unfinished: pass
"""


def test_a_process_that_ends_while_it_connects_to_a_stopped_trainer_ends_well() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = str(silent.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-c", CONNECTING, port], capture_output=True, timeout=LIMIT_S
        )
    assert done.returncode == 0, done.stderr.decode()


MEETING = """
import socket
from weight_sync.transports import rendezvous
silent = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
silent.bind(("127.0.0.1", 53))
rendezvous.CONNECT_S = 0.5
store = rendezvous.RendezvousStore("127.0.0.1", 0)
assert rendezvous.connect("127.0.0.1", store.port).timeout.total_seconds() == 0.5
"""


@pytest.mark.extended
@pytest.mark.skipif(not shutil.which("bwrap"), reason="bubblewrap is not installed")
def test_names_of_addresses_that_cannot_be_looked_up_do_not_matter(tmp_path: Path) -> None:
    resolver = tmp_path / "resolv.conf"
    resolver.write_text("nameserver 127.0.0.1\noptions timeout:1 attempts:1\n")
    alone = ["bwrap", "--dev-bind", "/", "/", "--unshare-net", "--cap-add", "CAP_NET_BIND_SERVICE"]
    mounts = ["--ro-bind", str(resolver), os.path.realpath("/etc/resolv.conf")]
    done = subprocess.run(
        [*alone, *mounts, sys.executable, "-c", MEETING], capture_output=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, done.stderr.decode()


def test_a_path_without_a_seat_is_refused(publisher: CollectivePublisher) -> None:
    meta = publisher.announce(7)
    with pytest.raises(SyncError, match="no rank"):
        CHANNEL.open_source(meta.path, meta, ReceiverConfig(), Deadline(LIMIT_S))


def test_an_engine_joins_with_all_its_ranks_while_its_server_reads_the_store(
    publisher: CollectivePublisher, spawn: Spawn, pool: ThreadPoolExecutor
) -> None:
    ranks = {1: spawn(), 2: spawn()}
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    member = Participant(path, 7, GroupRank(1, 1, 3), Deadline(LIMIT_S), num_ranks=2)
    group_setup = member.join("")
    for rank, child in ranks.items():
        child.tell(Engine(group_setup.group, member.port, rank, 3))
    number, found = 0, dict[str, str]()
    while (header := member.bucket(number)).digest is None:
        for child in ranks.values():
            child.tell(header)
            checksums = child.heard()
            found |= checksums
            assert checksums == {entry.name: entry.checksum for entry in header.entries}
        number += 1
    member.report_received()
    assert published.result(LIMIT_S).digest == header.digest
    assert found == {name: tensor_checksum(t) for name, t in weights().items()}


def test_a_tensor_is_read_once(publisher: CollectivePublisher, pool: ThreadPoolExecutor) -> None:
    path = publisher.announce(7).path
    published = pool.submit(publisher.publish, 7, weights().items())
    meta = WeightUpdateMeta(7, path, group_rank=GroupRank(1, 1, 2))
    source = CHANNEL.open_source(path, meta, ReceiverConfig(), Deadline(LIMIT_S))
    for entry in source.entries():
        source.read(entry)
        with pytest.raises(SyncError, match="cannot be read again"):
            source.read(entry)
    assert source.manifest().digest == published.result(LIMIT_S).digest
    source.close()


def test_memory_is_written_again_only_when_nobody_holds_it() -> None:
    memory = Buffers()
    held = memory.take(1 << 20)
    view, address = held[4:8].view(torch.float32), held.data_ptr()
    del held
    assert memory.take(1 << 20).data_ptr() != address
    del view
    again = [memory.take(1 << 20) for _ in range(2)]
    assert address in [block.data_ptr() for block in again]
