"""Members of a broadcast in processes of their own, that can be stopped and killed.

A child takes orders over its pipe, one after the other, and answers each with `("done", ...)`,
`("failed", code, message)`, or with `("holding", what)` where an order says so: it then waits for any
word, or for its end.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from headway.contracts.config.weight_sync import CollectiveSync, ReceiverConfig
from headway.contracts.errors import ServiceError
from headway.contracts.types import GroupRank, WeightUpdateMeta
from tests.processes import FORKS
from weight_sync.codecs import decode
from weight_sync.deadline import Deadline
from weight_sync.manifest import has_checksum, tensor_checksum
from weight_sync.transports.collective import CHANNEL
from weight_sync.transports.groups import meet_group
from weight_sync.transports.participant import Participant
from weight_sync.transports.process_group import GroupAddress, group_device
from weight_sync.transports.rendezvous import BucketHeader, connect

LIMIT_S = 60.0
"""For a child to answer; it is a failure of the test, not of what is tested."""


def weights(seed: int = 0, buckets: int = 8) -> dict[str, torch.Tensor]:
    """Tensors of all kinds, one bucket of 1 MiB per `big`."""
    random = torch.Generator().manual_seed(seed)
    odd = {
        "odd.bf16": torch.randn(3, 5, 7, generator=random).bfloat16(),
        "one": torch.randn(1, generator=random).half(),
        "empty": torch.empty(0, 4),
        "scalar": torch.randn((), generator=random),
        "special": torch.tensor([-0.0, 3e38, 3e38, 1e-45]),
    }
    big = {f"big.{i}": torch.randn(1 << 18, generator=random) for i in range(buckets)}
    return odd | big


@dataclass(frozen=True, slots=True)
class Receive:
    """Take a version as a server does."""

    path: str
    version: int
    group_rank: GroupRank
    deadline_s: float = LIMIT_S
    hold_at: str | None = None
    """The tensor that came when it stops reading."""


@dataclass(frozen=True, slots=True)
class Half:
    """Sit, join the group or not, take some buckets, hold."""

    path: str
    version: int
    group_rank: GroupRank
    joins: bool = True
    num_parts: int = 0


@dataclass(frozen=True, slots=True)
class Publish:
    """Publish `weights()`."""

    config: CollectiveSync
    version: int
    hold_at: str | None = None
    """The tensor whose gathering does not end."""
    on_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """Join as SGLang's engines do; then answer each `BucketHeader` with the checksums of what came."""

    group: str
    port: int
    rank: int
    world_size: int


class Child:
    """One process; use it as a context. It sees one GPU, or none."""

    def __init__(self, gpu: int | None = None, **environment: str) -> None:
        self._pipe, theirs = FORKS.Pipe()
        environment["CUDA_VISIBLE_DEVICES"] = "" if gpu is None else str(gpu)
        self.process: BaseProcess = FORKS.Process(
            target=_obey, args=(theirs, environment), daemon=True
        )
        self.process.start()
        theirs.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._pipe.close()

    def tell(self, order: object) -> None:
        self._pipe.send(order)

    def heard(self) -> Any:
        """Its next answer."""
        assert self._pipe.poll(LIMIT_S), "the child gave no answer"
        return self._pipe.recv()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)

    def end(self) -> int | None:
        """Let it run off its end; its exit status."""
        self.tell(None)
        self.process.join(LIMIT_S)
        return self.process.exitcode


Spawn = Callable[[], Child]


def receive(order: Receive, deadline: Deadline, hold: Any = None) -> tuple[str, dict[str, str]]:
    """The digest, and type, shape and checksum of every tensor."""
    meta = WeightUpdateMeta(order.version, order.path, group_rank=order.group_rank)
    source = CHANNEL.open_source(order.path, meta, ReceiverConfig(), deadline)
    facts = {}
    try:
        for entry in source.entries():
            tensor = decode(entry, source.read(entry), None)
            facts[entry.name] = fact(tensor)
            assert has_checksum(tensor, entry.checksum)
            if entry.name == order.hold_at:
                hold(entry.name)
        return source.manifest().digest, facts
    finally:
        source.close()


def fact(tensor: torch.Tensor) -> str:
    """Equal for equal bits."""
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor_checksum(tensor.cpu())}"


def facts(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The fact of each."""
    return {name: fact(tensor) for name, tensor in tensors.items()}


def _obey(pipe: Connection, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    kept: list[Any] = []

    def hold(what: str) -> None:
        pipe.send(("holding", what))
        pipe.recv()

    while (order := pipe.recv()) is not None:
        try:
            if isinstance(order, Receive):
                pipe.send(("done", *receive(order, Deadline(order.deadline_s), hold)))
            elif isinstance(order, Half):
                kept.append(_take_half(order))
                hold("half")
            elif isinstance(order, Engine):
                kept.append(_join_as_engine(order))
            elif isinstance(order, BucketHeader):
                pipe.send(_receive_as_engine(order, kept[-1]))
            elif isinstance(order, Publish):
                publisher = CHANNEL.make_publisher(order.config)
                kept.append(publisher)
                pipe.send(("announced", publisher.announce(order.version).path))
                meta = publisher.publish(order.version, _gathered(order, hold))
                pipe.send(("done", meta.digest))
        except ServiceError as error:
            pipe.send(("failed", error.code, error.message))


def _take_half(order: Half) -> object:
    deadline = Deadline(LIMIT_S)
    member = Participant(order.path, order.version, order.group_rank, deadline)
    group_setup = member.join("")
    if not order.joins:
        return member
    group_rank = order.group_rank
    address = GroupAddress(
        group_setup.group,
        member.host,
        member.port,
        group_rank.rank,
        group_rank.world_size,
        group_setup.backend,
    )
    group = meet_group(
        address,
        connect(member.host, member.port),
        group_setup.timeout_s,
        group_device(group_setup.backend),
    )
    for number in range(order.num_parts):
        target = torch.empty(member.bucket(number).size, dtype=torch.uint8)
        group.begin_receiving(target, member.watch)
        group.finish(member.watch)
    return member, group


def _join_as_engine(order: Engine) -> dist.ProcessGroup:
    """As `init_custom_process_group` of SGLang."""
    endpoint = f"tcp://127.0.0.1:{order.port}"
    store, rank, world_size = next(rendezvous(endpoint, order.rank, order.world_size))
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend("gloo"),
        c10d.PrefixStore(order.group, store),
        group_name=order.group,
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


def _receive_as_engine(header: BucketHeader, group: dist.ProcessGroup) -> dict[str, str]:
    flat = torch.empty(header.size, dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=group)
    return {e.name: tensor_checksum(flat[e.offset : e.offset + e.size]) for e in header.entries}


def _gathered(order: Publish, hold: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights().items():
        if name == order.hold_at:
            hold(name)
        yield name, tensor.cuda() if order.on_gpu else tensor
