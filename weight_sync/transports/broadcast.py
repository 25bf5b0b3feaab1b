"""The trainer's side of a broadcast: gathered by one thread, laid out and sent by another.

What was gathered stays in the CPU's memory until the version is published. So a membership that changes
midway costs one more sending, not one more gathering in which every rank of the trainer had to take
part. The price is one copy of the published weights (2 bytes per parameter in bfloat16, about 1
quantized) on the host of rank 0 while it publishes, and two buckets always. Tensors that lie on the CPU
already are not copied: nobody may write to them before `publish` returns.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch

from headway.contracts.config.weight_sync import CollectiveSync, Quantization
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.codecs import encode_quantized
from weight_sync.manifest import TensorEntry, dtype_name, tensor_checksum
from weight_sync.outgoing import Bucket
from weight_sync.patience import Patience
from weight_sync.store import version_name
from weight_sync.transports.detached import call_detached
from weight_sync.transports.meeting import LOOK_S, Host, Meeting, Part, Plan, Round
from weight_sync.transports.process_group import (
    GroupAddress,
    WeightGroup,
    empty_bytes,
    make_group,
)

T = TypeVar("T")
ALIGNMENT = 64
"""Of quantized tensors, whose sizes are odd."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bucket; its bytes are the pieces one behind the other, each [n] uint8 on the CPU."""

    entries: tuple[TensorEntry, ...]
    pieces: tuple[torch.Tensor, ...]

    @property
    def size(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


def pack(number: int, bucket: Bucket, quantization: Quantization | None) -> Parcel:
    """The n-th bucket, with checksums.

    Tensors that are not quantized lie one behind the other without gaps, as SGLang's flattened buckets
    do; the widest types come first, so that each begins where its type may.
    """
    blob = f"bucket-{number:05d}"
    if quantization is not None:
        return _pack_quantized(blob, bucket, quantization)
    ordered = sorted(bucket, key=lambda named: -named[1].element_size())
    pieces = [_bytes(tensor.cpu()) for _, tensor in ordered]
    entries, offset = [], 0
    for (name, tensor), piece in zip(ordered, pieces, strict=True):
        entries.append(_entry(name, tensor, tensor_checksum(piece), blob, offset, piece.numel()))
        offset += piece.numel()
    return Parcel(tuple(entries), tuple(pieces))


class Staging:
    """Two buffers in which parcels are laid out to be sent, one while the other is sent."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def lay_out(self, parcel: Parcel) -> torch.Tensor:
        """[size] uint8, until the call after the next."""
        if len(parcel.pieces) == 1:
            return parcel.pieces[0]
        buffer = self._buffers.pop(0) if len(self._buffers) == 2 else None
        if buffer is None or buffer.numel() < parcel.size:
            buffer = empty_bytes(parcel.size)
        self._buffers.append(buffer)
        payload = buffer[: parcel.size]
        torch.cat(parcel.pieces, out=payload)
        return payload

    def drop(self) -> None:
        """Forget the buffers, from which somebody may still be sending."""
        self._buffers = []


class Spool:
    """Parcels in order; one thread adds, another one takes."""

    def __init__(self) -> None:
        self._parcels: list[Parcel] = []
        self._more = threading.Event()
        self.digest: str | None = None
        """Set once all are there."""

    def __len__(self) -> int:
        return len(self._parcels)

    def __getitem__(self, number: int) -> Parcel:
        return self._parcels[number]

    def add(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._more.set()

    def finish(self, digest: str) -> None:
        self.digest = digest
        self._more.set()

    def wait(self, seconds: float) -> None:
        """Until something was added, or the time is over."""
        self._more.wait(seconds)
        self._more.clear()


class Broadcast:
    """One version on its way to whoever plans to take it.

    An epoch that fails leaves the version as it is: the rest of `timeout_s` is there for a newer plan of
    those who are left. One thread runs it; `patience` ends it from any other.
    """

    def __init__(
        self,
        host: Host,
        version: PolicyVersion,
        config: CollectiveSync,
        spool: Spool,
        patience: Patience,
        group: WeightGroup | None,
        staging: Staging,
    ) -> None:
        self._host = host
        self._version = version
        self._config = config
        self._spool = spool
        self._patience = patience
        self._peers = Patience(config.timeout_s, f"the receivers of version {version}")
        self._staging = staging
        self._looked = 0.0
        self._num_announced = 0
        self.group = group
        """What the next version may use again."""

    def run(self) -> None:
        """Returns when everybody has everything.

        Raises:
            SyncError: `patience` has ended, or an epoch failed and no newer one came in time.
        """
        plan: Plan | None = None
        failure: SyncError | None = None
        try:
            while True:
                plan = self._newer_plan(plan, failure)
                try:
                    self._serve(plan)
                except SyncError as error:
                    failure = error
                    continue
                if self._host.close_plan(
                    self._version, plan, "has been brought to all its members"
                ):
                    return
        except SyncError as error:
            self._close_any(f"was given up: {error.message}")
            raise

    def _newer_plan(self, last: Plan | None, failure: SyncError | None) -> Plan:
        def ask() -> Plan | None:
            plan = self._host.plan(self._version)
            return plan if plan is not None and (last is None or plan.epoch > last.epoch) else None

        try:
            return self._wait(ask, self._watch_patience)
        except SyncError as error:
            _ = self._patience.left_s
            raise (failure or error) from None

    def _serve(self, plan: Plan) -> None:
        """One epoch."""
        current = self._host.round(self._version, plan)

        def watch() -> None:
            self._watch_patience()
            if time.monotonic() - self._looked > LOOK_S:
                self._look(current, plan)

        self._num_announced = 0
        try:
            seats = self._wait(lambda: current.seats(plan.world_size), watch)
            group = self.group = self._meet(current, plan, seats, watch)
            self._send(current, group, watch)
            current.add_part(Part(digest=self._spool.digest))
            self._wait(lambda: current.have_arrived(plan.world_size) or None, watch)
        except SyncError as error:
            with suppress(SyncError):
                current.fail(error)
            self._leave()
            self._staging.drop()
            raise

    def _send(self, current: Round, group: WeightGroup, watch: Callable[[], None]) -> None:
        """One parcel is laid out, and waits at the receivers, while the one before is on the wire."""
        number = 0
        while (parcel := self._parcel(current, number, watch)) is not None:
            group.begin_sending(self._staging.lay_out(parcel), watch)
            if number > 0:
                self._finish(group, watch)
            number += 1
        if number > 0:
            self._finish(group, watch)

    def _finish(self, group: WeightGroup, watch: Callable[[], None]) -> None:
        group.finish(watch)
        self._peers.progress()

    def _meet(
        self, current: Round, plan: Plan, seats: list[str], watch: Callable[[], None]
    ) -> WeightGroup:
        kept = self.group
        is_kept = kept is not None and kept.address.world_size == plan.world_size
        if kept is not None and is_kept and set(seats) == {kept.address.name}:
            current.meet(self._meeting(kept.address.name, is_new=False))
            return kept
        self._leave()
        name = f"{version_name(self._version)}-{plan.epoch}"
        meeting = self._meeting(name, is_new=True)
        current.meet(meeting)
        address = GroupAddress(
            name, self._host.host, self._host.port, 0, plan.world_size, meeting.backend
        )

        def make() -> WeightGroup:
            return make_group(address, self._host.connect(), self._config.timeout_s)

        return call_detached(make, watch, discard=WeightGroup.close)

    def _meeting(self, group: str, is_new: bool) -> Meeting:
        return Meeting(
            group=group,
            is_new=is_new,
            backend=self._config.backend,
            timeout_s=self._config.timeout_s,
        )

    def _parcel(self, current: Round, number: int, watch: Callable[[], None]) -> Parcel | None:
        """The n-th one; None behind the last."""
        while number >= len(self._spool):
            if self._spool.digest is not None and number >= len(self._spool):
                return None
            watch()
            self._peers.progress()  # the wait is for ourselves
            self._spool.wait(LOOK_S)
        self._tell(current)
        return self._spool[number]

    def _tell(self, current: Round) -> None:
        """Receivers make room for a bucket while the one before is under way."""
        while self._num_announced < len(self._spool):
            parcel = self._spool[self._num_announced]
            current.add_part(Part(entries=parcel.entries, size=parcel.size))
            self._num_announced += 1

    def _look(self, current: Round, plan: Plan) -> None:
        failure = current.failure()
        if failure is not None:
            raise failure
        newest = self._host.plan(self._version)
        if newest is not None and newest.epoch > plan.epoch:
            raise Fenced(
                f"epoch {plan.epoch} of version {self._version} was superseded by epoch {newest.epoch}"
            )
        self._tell(current)
        self._looked = time.monotonic()

    def _watch_patience(self) -> None:
        _ = self._patience.left_s
        _ = self._peers.left_s

    def _wait(self, ask: Callable[[], T | None], watch: Callable[[], None]) -> T:
        while (answer := ask()) is None:
            watch()
            self._patience.pause()
        self._peers.progress()
        return answer

    def _close_any(self, reason: str) -> None:
        with suppress(SyncError):
            while not self._host.close_plan(self._version, self._host.plan(self._version), reason):
                continue

    def _leave(self) -> None:
        if self.group is not None:
            self.group.close()
        self.group = None


def _pack_quantized(blob: str, bucket: Bucket, quantization: Quantization) -> Parcel:
    entries, pieces, offset = [], list[torch.Tensor](), 0
    for name, tensor in bucket:
        encoded = encode_quantized(tensor.cpu(), quantization)
        size = encoded.payload.numel()
        entry = _entry(name, tensor, encoded.checksum, blob, offset, size)
        entries.append(entry.model_copy(update={"codec": encoded.codec}))
        padding = -size % ALIGNMENT
        pieces += [encoded.payload, torch.zeros(padding, dtype=torch.uint8)]
        offset += size + padding
    return Parcel(tuple(entries), tuple(pieces))


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


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
