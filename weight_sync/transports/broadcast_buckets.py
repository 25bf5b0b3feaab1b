"""What a broadcast sends: buckets of tensors with their checksums, from the CPU or from a GPU."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import torch

from headway.contracts.config.weight_sync import Quantization
from weight_sync.codecs import encode_quantized
from weight_sync.device_copy import HostCopy, bytes_on_device, on_host
from weight_sync.gpu_checksum import multilinear_checksums
from weight_sync.manifest import TensorEntry, dtype_name, tensor_checksum
from weight_sync.published_tensors import Bucket
from weight_sync.transports.process_group import empty_bytes

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
