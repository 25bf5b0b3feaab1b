"""A server's end of a broadcast: it receives ahead of the reader, in a group that is kept for the next
version."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import get_args

import torch

from headway.contracts.errors import SyncError
from headway.contracts.types import GroupRank, PolicyVersion
from weight_sync.buffers import Buffers
from weight_sync.deadline import Deadline
from weight_sync.device_copy import beside_serving, for_serving
from weight_sync.manifest import Manifest, TensorEntry, make_manifest
from weight_sync.store import Announcement
from weight_sync.transports.broadcast_buckets import HOST
from weight_sync.transports.daemon_calls import call_detached, start_detached
from weight_sync.transports.groups import BroadcastGroup, meet_group
from weight_sync.transports.nccl import own_build
from weight_sync.transports.participant import Participant
from weight_sync.transports.process_group import GroupAddress, GroupBackend, group_device
from weight_sync.transports.rendezvous import BucketHeader, connect

AHEAD = 2
"""Buckets that have come and were not yet asked for."""
LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class _ReceivedBucket:
    """A bucket, or with a digest the end."""

    entries: tuple[TensorEntry, ...]
    payload: torch.Tensor
    digest: str | None = None


class GroupCache:
    """Groups of the versions before, by rank; a server has one, its process may be several members."""

    def __init__(self) -> None:
        self._groups: dict[int, BroadcastGroup] = {}
        self._lock = threading.Lock()

    def take(self, host: str, port: int, group_rank: GroupRank) -> BroadcastGroup | None:
        """Return the group that was left with these very ranks."""
        with self._lock:
            group = self._groups.pop(group_rank.rank, None)
        if group is None:
            return None
        found = group.address
        if (found.host, found.port, found.world_size) == (host, port, group_rank.world_size):
            return group
        group.close()
        return None

    def put(self, group: BroadcastGroup) -> None:
        """Keep it; a trainer keeps one, so those of other names are dead."""
        used = replace(group.address, rank=0)
        with self._lock:
            for rank, other in list(self._groups.items()):
                if replace(other.address, rank=0) != used or rank == group.address.rank:
                    self._groups.pop(rank).close()
            self._groups[group.address.rank] = group


class CollectiveSource:
    """`Source` of a version that flows; a thread of its own receives ahead of the reader.

    All that can block is on that thread, a daemon: the reader's deadline passes the waiting in any case,
    also when the trainer was stopped and its store answers nothing.
    """

    def __init__(
        self,
        path: str,
        version: PolicyVersion,
        group_rank: GroupRank,
        deadline: Deadline,
        kept: GroupCache,
        memory: Buffers,
        on_device: bool,
    ) -> None:
        """Args:
        kept: the groups of versions before.
        memory: of the host.
        on_device: whether to hold payloads on a device that the group has.
        """
        self._path = path
        self._group_rank = group_rank
        self._deadline = deadline
        self._kept = kept
        self._memory = memory
        self._on_device = on_device
        self._inbox: queue.Queue[_ReceivedBucket] = queue.Queue(AHEAD)
        self._failure: Exception | None = None
        self._payloads: dict[str, torch.Tensor] = {}
        self._seen: list[TensorEntry] = []
        self._digest: str | None = None
        backend = _backend_of(path)
        self._device = group_device(backend)
        build = own_build() if backend == "nccl" else None
        self._member = call_detached(
            lambda: Participant(path, version, group_rank, deadline, build=build),
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
        return SyncError(f"rank {self._group_rank.rank} left {self._path} before it had everything")

    def _take(self) -> _ReceivedBucket:
        while True:
            if self._failure is not None:
                raise self._failure
            self._watch()
            with suppress(queue.Empty):
                return self._inbox.get(timeout=LOOK_S)

    def _put(self, item: _ReceivedBucket) -> None:
        while True:
            with suppress(queue.Full):
                self._inbox.put(item, timeout=LOOK_S)
                return
            self._member.watch()

    def _watch(self) -> None:
        self._deadline.check()

    def _receive(self) -> None:
        group: BroadcastGroup | None = None
        try:
            group = self._join_group()
            with beside_serving(group.device):
                digest = self._receive_from(group)
            self._kept.put(group)
            group = None
            self._put(_ReceivedBucket((), torch.empty(0, dtype=torch.uint8), digest))
        except Exception as error:  # noqa: BLE001 - the reader handles it
            self._failure = self._member.leave(error) if isinstance(error, SyncError) else error
            if group is not None:
                group.close()

    def _join_group(self) -> BroadcastGroup:
        member, group_rank = self._member, self._group_rank
        kept = self._kept.take(member.host, member.port, group_rank)
        try:
            group_setup = member.join("" if kept is None else kept.address.name)
        except SyncError:
            if kept is not None:
                kept.close()
            raise
        if kept is not None:
            if not group_setup.is_new:
                return kept
            kept.close()
        address = GroupAddress(
            group_setup.group,
            member.host,
            member.port,
            group_rank.rank,
            group_rank.world_size,
            group_setup.backend,
        )

        def make() -> BroadcastGroup:
            store = connect(member.host, member.port)
            return meet_group(address, store, group_setup.timeout_s, self._device)

        return call_detached(make, member.watch, discard=BroadcastGroup.close)

    def _receive_from(self, group: BroadcastGroup) -> str:
        """Everything; returns the digest. A bucket can flow before the one before is finished."""
        member, flowing, number = self._member, deque[_ReceivedBucket](), 0
        device = group.device if self._on_device else HOST

        def finish() -> None:
            group.finish(member.watch)
            self._deadline.restart()
            self._put(flowing.popleft())

        while True:
            if flowing and not member.epoch.has_bucket(number):
                finish()
            header = member.bucket(number)
            if header.digest is not None:
                break
            flowing.append(_ReceivedBucket(header.entries, room_for(header, device, self._memory)))
            group.begin_receiving(flowing[-1].payload, member.watch)
            if len(flowing) > 1:
                finish()
            number += 1
        if flowing:
            finish()
        member.report_received()
        return header.digest


def room_for(header: BucketHeader, device: torch.device, memory: Buffers) -> torch.Tensor:
    """Return [header.size] uint8 to receive a bucket into.

    It is on the device if the values are served as they arrive and fit there; else on the host.
    """
    if device.type != "cpu" and all(entry.codec == "raw" for entry in header.entries):
        with suppress(torch.cuda.OutOfMemoryError):
            return for_serving(torch.empty(header.size, dtype=torch.uint8, device=device))
    return memory.take(header.size)


def _backend_of(path: str) -> GroupBackend:
    known: tuple[GroupBackend, ...] = get_args(GroupBackend)
    for backend in known:
        if path.startswith(f"{backend}:"):
            return backend
    raise SyncError(f"{path} names no process group; known are {', '.join(known)}")
