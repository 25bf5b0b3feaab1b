"""Weights of a GPU on their way to the host, and on streams of their own.

A bucket comes to the host in one copy, into pinned memory, on a stream beside the gathering of the next
bucket. Tensors that are on the CPU already are passed on as they are. Weights for a GPU are received and
verified on a stream beside the one in which tokens are computed, the default one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

from weight_sync.channel import NamedTensors
from weight_sync.published_tensors import Bucket, buckets

SNAPSHOT_BYTES = 64 << 20
"""Bytes that are copied at a time."""


class HostCopy:
    """The bytes of a device's tensor on their way to the CPU."""

    def __init__(self, flat: Tensor) -> None:
        """
        Args:
            flat: [n] uint8, not written to until `wait` returns.
        """
        is_cuda = flat.device.type == "cuda"
        self._host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=is_cuda)
        self._event: torch.cuda.Event | None = None
        if not is_cuda:
            self._host.copy_(flat)
            return
        stream = _copy_stream(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        with torch.cuda.stream(stream):
            self._host.copy_(flat, non_blocking=True)
        flat.record_stream(stream)  # its memory is not given away before
        self._event = stream.record_event()

    def wait(self) -> Tensor:
        """Return [n] uint8 on the CPU, once it is there."""
        if self._event is not None:
            self._event.synchronize()
        return self._host


class BucketCopy:
    """A bucket on its way to the CPU."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = list(bucket)
        self._copies: list[tuple[list[int], HostCopy]] = []
        away: dict[torch.device, list[int]] = {}
        for index, (_, tensor) in enumerate(bucket):
            if not tensor.is_cpu:
                away.setdefault(tensor.device, []).append(index)
        for indices in away.values():
            indices.sort(key=lambda index: -bucket[index][1].element_size())
            flat = joined([bucket[index][1] for index in indices])
            self._copies.append((indices, HostCopy(flat)))

    @property
    def is_there(self) -> bool:
        """True if all of it was on the CPU from the start."""
        return not self._copies

    def wait(self) -> Bucket:
        """Return it on the CPU, in its order."""
        for indices, copy in self._copies:
            tensors = [self._bucket[index][1] for index in indices]
            parts = copy.wait().split([tensor.nbytes for tensor in tensors])
            for index, tensor, part in zip(indices, tensors, parts, strict=True):
                value = part.view(tensor.dtype).view(tensor.shape)
                self._bucket[index] = (self._bucket[index][0], value)
        self._copies = []
        return self._bucket


def on_host(bucket: Bucket) -> Bucket:
    """Return the bucket on the CPU."""
    return BucketCopy(bucket).wait()


def buckets_on_host(ready: Iterator[Bucket]) -> Iterator[Bucket]:
    """Yield buckets on the CPU; the copy of one is waited for when the next one was gathered."""
    copying: BucketCopy | None = None
    for bucket in ready:
        coming = BucketCopy(bucket)
        del bucket  # its copy holds what it needs
        if copying is not None:
            yield copying.wait()
            copying = None
        if coming.is_there:
            yield coming.wait()
        else:
            copying = coming
        del coming
    if copying is not None:
        yield copying.wait()


def snapshot(tensors: NamedTensors, dtype: torch.dtype | None) -> Bucket:
    """Return copies on the CPU that nothing else writes to; cast on the tensors' device.

    Args:
        dtype: None keeps the types.
    """
    copied: Bucket = []
    for bucket in buckets_on_host(buckets(_own(tensors, dtype), SNAPSHOT_BYTES)):
        copied += bucket
    return copied


def _own(tensors: NamedTensors, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        value = tensor.detach()
        yield name, value.to(dtype or value.dtype, copy=value.is_cpu)


def joined(tensors: list[Tensor]) -> Tensor:
    """Return the bytes of tensors of one device, one after the other: [n] uint8.

    Give the widest types first, so that each begins where its type may.
    """
    pieces = [bytes_on_device(tensor) for tensor in tensors]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def bytes_on_device(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor on its device: [n] uint8, not copied if it is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@contextmanager
def beside_serving(device: torch.device) -> Iterator[None]:
    """Within it this thread's work on a GPU waits for no token that is computed there."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(_staging_stream(device)):
        yield


def for_serving(tensor: Tensor) -> Tensor:
    """Return a tensor of `beside_serving` that is going to be read where tokens are computed.

    Its memory is not given away before those that were launched by then have read it.
    """
    if tensor.device.type == "cuda":
        tensor.record_stream(torch.cuda.default_stream(tensor.device))
    return tensor


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@cache
def _staging_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
