"""The trainer's end of a broadcast: it packs buckets while another thread sends them."""

from __future__ import annotations

import math
from collections.abc import Collection
from concurrent.futures import Future, wait

import torch

from headway.contracts.config.weight_sync import CollectiveSync, Dtype
from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.channel import NamedTensors
from weight_sync.deadline import Deadline
from weight_sync.manifest import TensorEntry, make_manifest
from weight_sync.published_tensors import buckets, outgoing
from weight_sync.store import Announcement, version_name
from weight_sync.tensors import check_finite
from weight_sync.transports.broadcast import Broadcast
from weight_sync.transports.broadcast_buckets import BucketQueue, SendBuffers, pack
from weight_sync.transports.daemon_calls import start_detached
from weight_sync.transports.groups import BroadcastGroup
from weight_sync.transports.handles import location_of
from weight_sync.transports.nccl import own_build
from weight_sync.transports.process_group import group_device
from weight_sync.transports.rendezvous import RendezvousStore, Requirements

END_S = 5.0
"""Seconds for the sending thread to notice that it was given up."""


class CollectivePublisher:
    """`WeightPublisher` of a process group: `publish` returns when every member has everything, and a
    decision that it follows has been made.
    """

    def __init__(self, config: CollectiveSync) -> None:
        self._config = config
        self._rendezvous = RendezvousStore(config.host, config.port)
        self._group: BroadcastGroup | None = None
        self._send_buffers = SendBuffers()
        self._announced: PolicyVersion | None = None
        self._latest: PolicyVersion | None = None
        self._deadline = Deadline(math.inf)
        self._decision: Future[PolicyVersion] | None = None

    @property
    def dtype(self) -> Dtype | None:
        return self._config.dtype

    @property
    def sends_from_device(self) -> bool:
        return self._config.backend != "gloo"

    def announce(self, version: PolicyVersion) -> WeightUpdateMeta:
        if self._latest is not None and version <= self._latest:
            raise SyncError(
                f"version {version} is not newer than {self._latest}, which was published; take a newer "
                "number"
            )
        self._rendezvous.announce(Announcement(version=version), self._requirements())
        self._announced = version
        self._deadline = Deadline(math.inf)
        self._decision = None
        return WeightUpdateMeta(version, self._path_of(version))

    def publish(self, version: PolicyVersion, tensors: NamedTensors) -> WeightUpdateMeta:
        if version != self._announced:
            self.announce(version)
        bucket_queue = BucketQueue()
        group, self._group = self._group, None
        device = group_device(self._config.backend)  # of this thread
        broadcast = Broadcast(
            self._rendezvous,
            version,
            self._config,
            bucket_queue,
            self._deadline,
            self._decision,
            group,
            self._send_buffers,
            device,
        )
        sending = start_detached(broadcast.run)
        try:
            digest = self._pack(version, tensors, bucket_queue, sending, device)
            sending.result()
        except BaseException as error:
            self._deadline.cancel(f"version {version} was not gathered: {error!r}")
            wait([sending], END_S)
            raise
        finally:
            self._announced = None
        self._group, self._latest = broadcast.group, version
        return WeightUpdateMeta(version, self._path_of(version), digest)

    def follow(self, version: PolicyVersion, decision: Future[PolicyVersion]) -> None:
        if version == self._announced:
            self._decision = decision
            self._deadline.end_if_refused(version, decision)

    def latest(self) -> PolicyVersion | None:
        return self._latest

    def collect(
        self, committed: PolicyVersion, pinned: Collection[PolicyVersion] = ()
    ) -> list[PolicyVersion]:
        """Delete nothing: a broadcast version is stored nowhere."""
        return []

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self._rendezvous.close()

    def _pack(
        self,
        version: PolicyVersion,
        tensors: NamedTensors,
        bucket_queue: BucketQueue,
        sending: Future[None],
        device: torch.device,
    ) -> str:
        entries: list[TensorEntry] = []
        ready = buckets(outgoing(tensors, self._config), self._config.shard_bytes)
        for number, bucket in enumerate(ready):
            if sending.done():
                sending.result()
            check_finite(bucket, f"version {version}")
            packed = pack(number, bucket, self._config.quantization, device)
            entries += packed.entries
            bucket_queue.add(packed)
        digest = make_manifest(version, entries).digest
        bucket_queue.finish(digest)
        return digest

    def _requirements(self) -> Requirements:
        """Return the requirements that participants must meet."""
        backend = self._config.backend
        return Requirements(
            build=own_build() if backend == "nccl" else None,
            location=location_of(group_device(backend)) if backend == "ipc" else None,
        )

    def _path_of(self, version: PolicyVersion) -> str:
        host = (
            f"[{self._rendezvous.host}]" if ":" in self._rendezvous.host else self._rendezvous.host
        )
        return f"{self._config.backend}://{host}:{self._rendezvous.port}/{version_name(version)}"
