"""The trainer's side of a broadcast: gathered by one thread, laid out and sent by another.

Gathered tensors stay in the CPU's memory until the version is published. So if the membership changes
midway, the version is sent once more, but not gathered again by all ranks of the trainer. The price is
one copy of the published weights (2 bytes per parameter in bfloat16, about 1 quantized) on the host of
rank 0 while it publishes, and two buckets always. Tensors that are on the CPU already are not copied:
they must not be written to before `publish` returns.

A group that sends from a GPU reads tensors of that GPU in place: their checksums are computed on it, and
the copy for the host, into pinned memory, is made while they are sent. At most `ON_DEVICE` buckets wait
there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from headway.contracts.config.weight_sync import CollectiveSync, Quantization
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.codecs import encode_quantized
from weight_sync.deadline import Deadline
from weight_sync.device_copy import HostCopy, bytes_on_device, on_host
from weight_sync.gpu_checksum import multilinear_checksums
from weight_sync.manifest import TensorEntry, dtype_name, tensor_checksum
from weight_sync.published_tensors import Bucket
from weight_sync.store import version_name
from weight_sync.transports.daemon_calls import call_detached
from weight_sync.transports.groups import BroadcastGroup, meet_group
from weight_sync.transports.process_group import GroupAddress, empty_bytes
from weight_sync.transports.rendezvous import (
    LOOK_S,
    BucketHeader,
    GroupSetup,
    RendezvousPlan,
    RendezvousStore,
    TransferEpoch,
)

T = TypeVar("T")
HOST = torch.device("cpu")
ALIGNMENT = 64
"""Alignment in bytes of quantized tensors, whose sizes are odd."""
ON_DEVICE = 2
"""Buckets that wait on a device to be sent from there; later ones wait on the host."""


@dataclass(slots=True)
class BroadcastBucket:
    """A bucket; its bytes are the pieces one behind the other, each [n] uint8 on one device."""

    entries: tuple[TensorEntry, ...]
    pieces: tuple[torch.Tensor, ...]
    copy: HostCopy | None = None
    """Copy of the only piece on the host, while the piece is on a device."""

    @property
    def size(self) -> int:
        return sum(piece.numel() for piece in self.pieces)

    def move_to_host(self) -> None:
        """Keep the copy on the host alone."""
        if self.copy is not None:
            self.pieces, self.copy = (self.copy.wait(),), None


def pack(
    number: int, bucket: Bucket, quantization: Quantization | None, device: torch.device = HOST
) -> BroadcastBucket:
    """The n-th bucket, with checksums.

    Tensors that are not quantized follow one another without gaps, as SGLang's flattened buckets
    do; the widest types come first, so that each begins where its type may.

    Args:
        device: from which the group sends; tensors on another one are sent from the host.
    """
    blob = f"bucket-{number:05d}"
    if quantization is not None:
        return _pack_quantized(blob, on_host(bucket), quantization)
    is_there = device.type != "cpu" and all(t.device == device for _, t in bucket)
    bucket = bucket if is_there else on_host(bucket)
    ordered = sorted(bucket, key=lambda named: -named[1].element_size())
    pieces = [bytes_on_device(tensor) for _, tensor in ordered]
    flat: torch.Tensor | None = None
    if is_there:
        # Joined before its sums are read, which waits for both; and even if it is one, so that the
        # trainer may write to a parameter before the version was sent again.
        flat = torch.cat(pieces)
        pieces = list(flat.split([piece.numel() for piece in pieces]))
        checksums = multilinear_checksums(pieces)
    else:
        checksums = [tensor_checksum(piece) for piece in pieces]
    entries, offset = [], 0
    for (name, tensor), piece, checksum in zip(ordered, pieces, checksums, strict=True):
        entries.append(_entry(name, tensor, checksum, blob, offset, piece.numel()))
        offset += piece.numel()
    if flat is None:
        return BroadcastBucket(tuple(entries), tuple(pieces))
    return BroadcastBucket(tuple(entries), (flat,), HostCopy(flat))


class SendBuffers:
    """Two buffers in which buckets are laid out, one while the other is sent."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def lay_out(self, bucket: BroadcastBucket) -> torch.Tensor:
        """[size] uint8, until the call after the next."""
        pieces = bucket.pieces
        if len(pieces) == 1:
            return pieces[0]
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else None
        if buffer is None or buffer.numel() < bucket.size:
            buffer = empty_bytes(bucket.size)
        self._buffers.append(buffer)
        payload = buffer[: bucket.size]
        torch.cat(pieces, out=payload)
        return payload

    def drop(self) -> None:
        """Forget the buffers, from which a group may still be sending."""
        self._buffers = []


class BucketQueue:
    """Buckets in order; one thread adds, another one takes."""

    def __init__(self) -> None:
        self._buckets: list[BroadcastBucket] = []
        self._more = threading.Event()
        self.digest: str | None = None
        """Set once all are there."""

    def __len__(self) -> int:
        return len(self._buckets)

    def __getitem__(self, number: int) -> BroadcastBucket:
        return self._buckets[number]

    def add(self, bucket: BroadcastBucket) -> None:
        if (
            bucket.copy is not None
            and sum(waiting.copy is not None for waiting in self._buckets) >= ON_DEVICE
        ):
            bucket.move_to_host()
        self._buckets.append(bucket)
        self._more.set()

    def finish(self, digest: str) -> None:
        self.digest = digest
        self._more.set()

    def wait(self, seconds: float) -> None:
        """Wait until something was added, or the time is over."""
        self._more.wait(seconds)
        self._more.clear()


class Broadcast:
    """One version on its way to the members of a plan.

    An epoch that fails leaves the version as it is: the rest of `timeout_s` is there for a newer plan of
    those who are left. One thread runs it; `deadline` ends it from any other.
    """

    def __init__(
        self,
        host: RendezvousStore,
        version: PolicyVersion,
        config: CollectiveSync,
        bucket_queue: BucketQueue,
        deadline: Deadline,
        decision: Future[PolicyVersion] | None,
        group: BroadcastGroup | None,
        staging: SendBuffers,
        device: torch.device,
    ) -> None:
        """Args:
        decision: of the service; until it is there, members may ask for the version again. None: once
            they have it, nobody may.
        group: that of the version before.
        device: from which groups send.
        """
        self._rendezvous = host
        self._version = version
        self._config = config
        self._bucket_queue = bucket_queue
        self._deadline = deadline
        self._decision = decision
        self._peers = Deadline(config.timeout_s, f"the receivers of version {version}")
        self._send_buffers = staging
        self._device = device
        self._looked = 0.0
        self._num_announced = 0
        self.group = group
        """Process group that the next version may use again."""

    def run(self) -> None:
        """Return when all members have everything and the service has decided.

        Raises:
            SyncError: `deadline` has ended, or an epoch failed and no newer one came in time.
        """
        plan: RendezvousPlan | None = None
        failure: SyncError | None = None
        try:
            while True:
                plan = self._newer_plan(plan, failure)
                try:
                    self._serve(plan)
                except SyncError as error:
                    failure = error
                    continue
                if self._is_last(plan) and self._rendezvous.close_plan(
                    self._version, plan, "has been brought to all its members"
                ):
                    return
        except SyncError as error:
            self._close_any(f"was given up: {error.message}")
            raise

    def _newer_plan(self, last: RendezvousPlan | None, failure: SyncError | None) -> RendezvousPlan:
        try:
            return self._wait(lambda: self._plan_after(last), self._check_deadline)
        except SyncError as error:
            self._deadline.check()
            raise (failure or error) from None

    def _plan_after(self, last: RendezvousPlan | None) -> RendezvousPlan | None:
        plan = self._rendezvous.plan(self._version)
        return plan if plan is not None and (last is None or plan.epoch > last.epoch) else None

    def _is_last(self, plan: RendezvousPlan) -> bool:
        """Wait for the service's decision; false if members ask for the version again before it.

        A member that dies between its last byte and its answer ends the epoch for those who are left.
        """
        decision = self._decision
        if decision is None:
            return True

        def ask() -> bool | None:
            if decision.done():
                return True
            return False if self._plan_after(plan) else None

        self._deadline.restart()
        return self._wait(ask, self._deadline.check)

    def _serve(self, plan: RendezvousPlan) -> None:
        """One epoch."""
        current = self._rendezvous.begin_epoch(self._version, plan)

        def watch() -> None:
            self._check_deadline()
            if time.monotonic() - self._looked > LOOK_S:
                self._look(current, plan)

        self._num_announced = 0
        try:
            held_groups = self._wait(lambda: current.held_groups(plan.world_size), watch)
            group = self.group = self._join_group(current, plan, held_groups, watch)
            self._send(current, group, watch)
            current.add_bucket(BucketHeader(digest=self._bucket_queue.digest))
            self._wait(lambda: current.all_received(plan.world_size) or None, watch)
        except SyncError as error:
            with suppress(SyncError):
                current.fail(error)
            self._leave()
            self._send_buffers.drop()
            raise

    def _send(
        self, current: TransferEpoch, group: BroadcastGroup, watch: Callable[[], None]
    ) -> None:
        """Send all buckets; the next one is laid out, and announced, while one is sent."""
        number = 0
        while (bucket := self._bucket(current, number, watch)) is not None:
            group.begin_sending(self._send_buffers.lay_out(bucket), watch)
            if number > 0:
                self._finish(group, watch, number - 1)
            number += 1
        if number > 0:
            self._finish(group, watch, number - 1)

    def _finish(self, group: BroadcastGroup, watch: Callable[[], None], number: int) -> None:
        group.finish(watch)
        self._bucket_queue[number].move_to_host()
        self._peers.restart()

    def _join_group(
        self,
        current: TransferEpoch,
        plan: RendezvousPlan,
        held_groups: list[str],
        watch: Callable[[], None],
    ) -> BroadcastGroup:
        kept = self.group
        is_kept = kept is not None and kept.address.world_size == plan.world_size
        if kept is not None and is_kept and set(held_groups) == {kept.address.name}:
            current.announce_group(self._group_setup(kept.address.name, is_new=False))
            return kept
        self._leave()
        name = f"{version_name(self._version)}-{plan.epoch}"
        group_setup = self._group_setup(name, is_new=True)
        current.announce_group(group_setup)
        address = GroupAddress(
            name,
            self._rendezvous.host,
            self._rendezvous.port,
            0,
            plan.world_size,
            group_setup.backend,
        )

        def make() -> BroadcastGroup:
            store = self._rendezvous.connect()
            return meet_group(address, store, self._config.timeout_s, self._device)

        return call_detached(make, watch, discard=BroadcastGroup.close)

    def _group_setup(self, group: str, is_new: bool) -> GroupSetup:
        return GroupSetup(
            group=group,
            is_new=is_new,
            backend=self._config.backend,
            timeout_s=self._config.timeout_s,
        )

    def _bucket(
        self, current: TransferEpoch, number: int, watch: Callable[[], None]
    ) -> BroadcastBucket | None:
        """The n-th one; None behind the last."""
        while number >= len(self._bucket_queue):
            if self._bucket_queue.digest is not None and number >= len(self._bucket_queue):
                return None
            watch()
            self._peers.restart()  # the wait is for ourselves
            self._bucket_queue.wait(LOOK_S)
        self._tell(current)
        return self._bucket_queue[number]

    def _tell(self, current: TransferEpoch) -> None:
        """Announce the new buckets: receivers allocate one while the one before is sent."""
        while self._num_announced < len(self._bucket_queue):
            bucket = self._bucket_queue[self._num_announced]
            current.add_bucket(BucketHeader(entries=bucket.entries, size=bucket.size))
            self._num_announced += 1

    def _look(self, current: TransferEpoch, plan: RendezvousPlan) -> None:
        failure = current.failure()
        if failure is not None:
            raise failure
        newest = self._rendezvous.plan(self._version)
        if newest is not None and newest.epoch > plan.epoch:
            raise Fenced(
                f"epoch {plan.epoch} of version {self._version} was superseded by epoch {newest.epoch}"
            )
        self._tell(current)
        self._looked = time.monotonic()

    def _check_deadline(self) -> None:
        self._deadline.check()
        self._peers.check()

    def _wait(self, ask: Callable[[], T | None], watch: Callable[[], None]) -> T:
        while (answer := ask()) is None:
            watch()
            self._deadline.pause()
        self._peers.restart()
        return answer

    def _close_any(self, reason: str) -> None:
        with suppress(SyncError):
            while not self._rendezvous.close_plan(
                self._version, self._rendezvous.plan(self._version), reason
            ):
                continue

    def _leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None


def _pack_quantized(blob: str, bucket: Bucket, quantization: Quantization) -> BroadcastBucket:
    entries, pieces, offset = [], list[torch.Tensor](), 0
    for name, tensor in bucket:
        encoded = encode_quantized(tensor, quantization)
        size = encoded.payload.numel()
        entry = _entry(name, tensor, encoded.checksum, blob, offset, size)
        entries.append(entry.model_copy(update={"codec": encoded.codec}))
        padding = -size % ALIGNMENT
        pieces += [encoded.payload, torch.zeros(padding, dtype=torch.uint8)]
        offset += size + padding
    return BroadcastBucket(tuple(entries), tuple(pieces))


def _entry(
    name: str, tensor: torch.Tensor, checksum: str, blob: str, offset: int, size: int
) -> TensorEntry:
    return TensorEntry(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        checksum=checksum,
        blob=blob,
        offset=offset,
        size=size,
    )
