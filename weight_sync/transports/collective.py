"""Versions broadcast to all servers at once, in a process group that is made for whoever takes part.

    gloo://trainer:29500/v00000007     on CPUs; nccl:// from GPU to GPU

The trainer hosts the rendezvous (`meeting`); the gateway tells every server its seat. A group lives as
long as its members stay the same: they say which one they hold, and the trainer takes it again only
if all hold the same as itself. Otherwise a new one is made, which costs milliseconds with Gloo and up
to seconds with NCCL. A group in which anything failed is never used again.

A version flows once: a server that comes too late, or finds a tensor damaged, has to turn to its
peers. Neither the rendezvous nor the group knows passwords or encryption: use a private network, and
`GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` to choose it.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Collection, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from headway.contracts.config.weight_sync import CollectiveSync, ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import GroupSeat, PolicyVersion, WeightUpdateMeta
from weight_sync.buffers import Buffers
from weight_sync.channel import NamedTensors
from weight_sync.manifest import Manifest, TensorEntry, make_manifest
from weight_sync.outgoing import buckets, outgoing
from weight_sync.patience import Patience
from weight_sync.store import Announcement, version_name
from weight_sync.transports.broadcast import Broadcast, Spool, Staging, pack
from weight_sync.transports.detached import call_detached, start_detached
from weight_sync.transports.meeting import Host, Member, connect
from weight_sync.transports.process_group import (
    GroupAddress,
    WeightGroup,
    make_group,
)

AHEAD = 2
"""Buckets that have come and were not yet asked for."""
LOOK_S = 0.02
END_S = 5.0
"""For the sending thread to see that it was given up."""


class CollectivePublisher:
    """`WeightPublisher` of a process group: `publish` returns when every member has everything."""

    def __init__(self, config: CollectiveSync) -> None:
        self._config = config
        self._host = Host(config.host, config.port)
        self._group: WeightGroup | None = None
        self._staging = Staging()
        self._announced: PolicyVersion | None = None
        self._latest: PolicyVersion | None = None
        self._patience = Patience(math.inf)

    def announce(self, version: PolicyVersion) -> WeightUpdateMeta:
        if self._latest is not None and version <= self._latest:
            raise SyncError(
                f"version {version} is not newer than {self._latest}, which was published; take a newer "
                "number"
            )
        self._host.announce(Announcement(version=version))
        self._announced = version
        self._patience = Patience(math.inf)
        return WeightUpdateMeta(version, self._path_of(version))

    def publish(self, version: PolicyVersion, tensors: NamedTensors) -> WeightUpdateMeta:
        if version != self._announced:
            self.announce(version)
        spool = Spool()
        group, self._group = self._group, None
        broadcast = Broadcast(
            self._host, version, self._config, spool, self._patience, group, self._staging
        )
        sending = start_detached(broadcast.run)
        try:
            digest = self._pack(version, tensors, spool, sending)
            sending.result()
        except BaseException as error:
            self._patience.give_up(f"version {version} was not gathered: {error!r}")
            wait([sending], END_S)
            raise
        finally:
            self._announced = None
        self._group, self._latest = broadcast.group, version
        return WeightUpdateMeta(version, self._path_of(version), digest)

    def cancel(self, version: PolicyVersion, reason: str) -> None:
        if version == self._announced:
            self._patience.give_up(f"version {version} was refused: {reason}")

    def latest(self) -> PolicyVersion | None:
        return self._latest

    def collect(
        self, committed: PolicyVersion, pinned: Collection[PolicyVersion] = ()
    ) -> list[PolicyVersion]:
        """Nothing: what was broadcast lies nowhere."""
        return []

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._host.close()

    def _pack(
        self, version: PolicyVersion, tensors: NamedTensors, spool: Spool, sending: Future[None]
    ) -> str:
        entries: list[TensorEntry] = []
        ready = buckets(outgoing(tensors, self._config), self._config.shard_bytes)
        for number, bucket in enumerate(ready):
            if sending.done():
                sending.result()
            parcel = pack(number, bucket, self._config.quantization)
            entries += parcel.entries
            spool.add(parcel)
        digest = make_manifest(version, entries).digest
        spool.finish(digest)
        return digest

    def _path_of(self, version: PolicyVersion) -> str:
        host = f"[{self._host.host}]" if ":" in self._host.host else self._host.host
        return f"{self._config.backend}://{host}:{self._host.port}/{version_name(version)}"


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A bucket, or with a digest the end."""

    entries: tuple[TensorEntry, ...]
    payload: torch.Tensor
    digest: str | None = None


class KeptGroups:
    """Groups of the versions before, by rank; a server has one, its process may be several members."""

    def __init__(self) -> None:
        self._groups: dict[int, WeightGroup] = {}
        self._lock = threading.Lock()

    def take(self, host: str, port: int, seat: GroupSeat) -> WeightGroup | None:
        """The group that was left in these very seats."""
        with self._lock:
            group = self._groups.pop(seat.rank, None)
        if group is None:
            return None
        found = group.address
        if (found.host, found.port, found.world_size) == (host, port, seat.world_size):
            return group
        group.close()
        return None

    def put(self, group: WeightGroup) -> None:
        """Keep it; a trainer keeps one, so those of other names are dead."""
        used = replace(group.address, rank=0)
        with self._lock:
            for rank, other in list(self._groups.items()):
                if replace(other.address, rank=0) != used or rank == group.address.rank:
                    self._groups.pop(rank).close()
            self._groups[group.address.rank] = group


class CollectiveSource:
    """`Source` of a version that flows; a thread of its own receives ahead of whoever reads.

    All that can block is on that thread, a daemon: the reader's patience ends the waiting in any case,
    also when the trainer was stopped and its store answers nothing.
    """

    def __init__(
        self,
        path: str,
        version: PolicyVersion,
        seat: GroupSeat,
        patience: Patience,
        kept: KeptGroups,
        memory: Buffers,
    ) -> None:
        self._path = path
        self._seat = seat
        self._patience = patience
        self._kept = kept
        self._memory = memory
        self._inbox: queue.Queue[_Arrived] = queue.Queue(AHEAD)
        self._failure: Exception | None = None
        self._payloads: dict[str, torch.Tensor] = {}
        self._seen: list[TensorEntry] = []
        self._digest: str | None = None
        self._member = call_detached(
            lambda: Member(path, version, seat, patience),
            self._watch,
            discard=lambda late: late.leave(self._gone()),
        )
        self.announcement: Announcement = self._member.announcement
        start_detached(self._receive)

    def entries(self) -> Iterator[TensorEntry]:
        while (arrived := self._take()).digest is None:
            for entry in arrived.entries:
                stored = arrived.payload[entry.offset : entry.offset + entry.size]
                if stored.numel() != entry.size:
                    raise SyncError(f"{entry.name} in {self._path} ends behind its bucket")
                self._payloads[entry.name] = stored
                self._seen.append(entry)
                yield entry
        self._digest = arrived.digest

    def read(self, entry: TensorEntry) -> torch.Tensor:
        payload = self._payloads.pop(entry.name, None)
        if payload is None:
            raise SyncError(f"{entry.name} in {self._path} has flowed by and cannot be read again")
        return payload

    def manifest(self) -> Manifest:
        if self._digest is None:
            raise SyncError(f"{self._path} is not complete yet")
        manifest = make_manifest(self.announcement.version, self._seen)
        if manifest.digest != self._digest:
            raise SyncError(f"{self._path} came with other entries than were sent: wrong digest")
        return manifest

    def close(self) -> None:
        self._member.stop(self._gone().message)
        self._payloads.clear()

    def _gone(self) -> SyncError:
        return SyncError(f"rank {self._seat.rank} left {self._path} before it had everything")

    def _take(self) -> _Arrived:
        while True:
            if self._failure is not None:
                raise self._failure
            self._watch()
            with suppress(queue.Empty):
                return self._inbox.get(timeout=LOOK_S)

    def _put(self, item: _Arrived) -> None:
        while True:
            with suppress(queue.Full):
                self._inbox.put(item, timeout=LOOK_S)
                return
            self._member.watch()

    def _watch(self) -> None:
        _ = self._patience.left_s

    def _receive(self) -> None:
        group: WeightGroup | None = None
        try:
            group = self._meet()
            digest = self._receive_from(group)
            self._kept.put(group)
            group = None
            self._put(_Arrived((), torch.empty(0, dtype=torch.uint8), digest))
        except Exception as error:  # noqa: BLE001 - the reader's to judge
            self._failure = self._member.leave(error) if isinstance(error, SyncError) else error
            if group is not None:
                group.close()

    def _meet(self) -> WeightGroup:
        member, seat = self._member, self._seat
        kept = self._kept.take(member.host, member.port, seat)
        try:
            meeting = member.meet("" if kept is None else kept.address.name)
        except SyncError:
            if kept is not None:
                kept.close()
            raise
        if kept is not None:
            if not meeting.is_new:
                return kept
            kept.close()
        address = GroupAddress(
            meeting.group, member.host, member.port, seat.rank, seat.world_size, meeting.backend
        )

        def make() -> WeightGroup:
            return make_group(address, connect(member.host, member.port), meeting.timeout_s)

        return call_detached(make, member.watch, discard=WeightGroup.close)

    def _receive_from(self, group: WeightGroup) -> str:
        """Everything; returns the digest. A bucket can flow before the one before is finished."""
        member, flowing, number = self._member, deque[_Arrived](), 0

        def finish() -> None:
            group.finish(member.watch)
            self._patience.progress()
            self._put(flowing.popleft())

        while True:
            if flowing and not member.has_part(number):
                finish()
            part = member.part(number)
            if part.digest is not None:
                break
            flowing.append(_Arrived(part.entries, self._memory.take(part.size)))
            group.begin_receiving(flowing[-1].payload, member.watch)
            if len(flowing) > 1:
                finish()
            number += 1
        if flowing:
            finish()
        member.arrive()
        return part.digest


class CollectiveChannel:
    """`WeightChannel` of process groups."""

    schemes = ("gloo", "nccl")

    def __init__(self) -> None:
        self._kept = KeptGroups()
        self._memory = Buffers()

    def make_publisher(self, config: CollectiveSync) -> CollectivePublisher:
        return CollectivePublisher(config)

    def open_source(
        self, path: str, meta: WeightUpdateMeta, config: ReceiverConfig, patience: Patience
    ) -> CollectiveSource:
        if meta.seat is None:
            raise SyncError(f"{path} is a process group, and no seat was given to this server")
        return CollectiveSource(path, meta.version, meta.seat, patience, self._kept, self._memory)


CHANNEL = CollectiveChannel()
