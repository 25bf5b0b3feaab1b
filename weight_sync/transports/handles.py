"""Handles: how one process of a host names memory to another, without a copy.

A GPU's memory has a CUDA IPC handle, which torch makes and opens; torch also counts its users, so
a handle is for one reader: export once for each. The CPU's memory is an anonymous file (`memfd`) of
the process that owns it, opened through `/proc`. Either is gone with its last holder, however that ends.

A process that opens memory of a GPU must see that GPU itself. Processes number their devices as
`CUDA_VISIBLE_DEVICES` says, so GPUs are identified by UUID.
"""

from __future__ import annotations

import base64
import mmap
import os
import socket
import threading
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headway.contracts.config.base import Config
from headway.contracts.errors import SyncError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MEMFD = "headway-weights-"

Field = str | int | bool | None


class MemoryLocation(Config):
    """Location of memory: host and device."""

    host: str
    """Boot id of the running kernel, so that containers of one host count as one host."""
    gpu: str | None = None
    """UUID; None for the CPU's memory."""


class Handle(Config):
    """Memory of another process."""

    kind: Literal["cuda", "memfd"]
    location: MemoryLocation
    fields: tuple[Field, ...]
    """Arguments with which torch opens it, bytes as base64; or process, descriptor, name and size of a
    file.
    """


def location_of(device: torch.device) -> MemoryLocation:
    """Return where memory of a device can be reached."""
    try:
        host = _BOOT_ID.read_text().strip()
    except OSError:
        host = socket.gethostname()
    gpu = None if device.type == "cpu" else _uuid(device.index or 0)
    return MemoryLocation(host=host, gpu=gpu)


def check_reachable(location: MemoryLocation) -> None:
    """Raises:
    SyncError: this process cannot open memory there.
    """
    here = location_of(torch.device("cpu")).host
    otherwise = "set trainer.weight_sync.type to shared_memory"
    if location.host != here:
        raise SyncError(
            f"the trainer's memory is on another host ({location.host}, this one is {here}); handles "
            f"do not reach beyond one: set trainer.weight_sync.type to http or disk"
        )
    if location.gpu is not None and location.gpu not in _visible():
        seen = ", ".join(_visible()) or "none"
        raise SyncError(
            f"the weights are on GPU {location.gpu}, and this server sees {seen}; add that GPU behind "
            f"its own in CUDA_VISIBLE_DEVICES, or {otherwise}"
        )


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """Memory of this process that others can open while it is held."""

    tensor: Tensor
    """[size] uint8."""
    descriptor: int | None = None
    name: str = ""

    def export(self) -> Handle:
        """Return a handle for one reader."""
        location = location_of(self.tensor.device)
        if self.descriptor is not None:
            fields = (os.getpid(), self.descriptor, self.name, self.tensor.numel())
            return Handle(kind="memfd", location=location, fields=fields)
        storage = self.tensor.untyped_storage()
        _, *fields = storage._share_cuda_()  # the device's number is the reader's concern
        return Handle(kind="cuda", location=location, fields=_packed(fields))


def allocate(size: int, device: torch.device) -> SharedMemory:
    """Return memory of at least one byte.

    Raises:
        SyncError: there is not so much.
    """
    size = max(1, size)
    try:
        if device.type != "cpu":
            known = _spare.take(size, device)
            if known is None:
                known = torch.empty(size, dtype=torch.uint8, device=device)
            return SharedMemory(known)
        name = _MEMFD + uuid.uuid4().hex
        descriptor = os.memfd_create(name)
        try:
            os.posix_fallocate(descriptor, 0, size)  # else a lack of memory would end the process
            memory = _mapped(descriptor, size)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(memory, os.close, descriptor)  # others open it by this one
        return SharedMemory(torch.from_numpy(memory), descriptor, name)
    except (RuntimeError, OSError) as error:
        raise SyncError(f"no memory for {size} bytes that others can open: {error}") from error


def retire(memory: SharedMemory) -> None:
    """Give memory up that was exported.

    A GPU's is kept, and allocated again: torch frees it when all readers have let it go, and one that was
    killed never does.
    """
    if memory.descriptor is None:
        _spare.add(memory.tensor)


class _Spare:
    """Memory of GPUs that was exported and is not used now."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tensors: list[Tensor] = []

    def add(self, tensor: Tensor) -> None:
        with self._lock:
            self._tensors.append(tensor)

    def take(self, size: int, device: torch.device) -> Tensor | None:
        """The smallest that is large enough."""
        with self._lock:
            fitting = [t for t in self._tensors if t.device == device and t.numel() >= size]
            if not fitting:
                return None
            best = min(fitting, key=torch.Tensor.numel)
            self._tensors = [tensor for tensor in self._tensors if tensor is not best]
            return best


_spare = _Spare()


def open_handle(handle: Handle) -> Tensor:
    """Return another process's memory: [size] uint8, not to be written to.

    Raises:
        SyncError: it cannot be reached from here, or is gone.
    """
    check_reachable(handle.location)
    try:
        if handle.kind == "memfd":
            return _open_file(*handle.fields)
        index = _visible()[handle.location.gpu or ""]
        storage = torch.UntypedStorage._new_shared_cuda(index, *_unpacked(handle.fields))
        device = torch.device("cuda", index)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
    except (RuntimeError, OSError, TypeError, ValueError, KeyError) as error:
        raise SyncError(f"the trainer's memory cannot be opened: {error}") from error


def _open_file(process: Field, number: Field, name: Field, size: Field) -> Tensor:
    if not isinstance(process, int) or not isinstance(number, int) or not isinstance(size, int):
        raise TypeError(f"{(process, number, size)} are no process, descriptor and size")
    path = f"/proc/{process}/fd/{number}"
    descriptor = os.open(path, os.O_RDWR)
    try:
        # By now the numbers may be of another file.
        if os.readlink(f"/proc/self/fd/{descriptor}") != f"/memfd:{name} (deleted)":
            raise ValueError(f"{path} is not {name} any more")
        return torch.from_numpy(_mapped(descriptor, size))
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int) -> NDArray[np.uint8]:
    """A file's memory, which holds the file without its descriptor."""
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


def settle(device: torch.device) -> None:
    """Wait until what this thread asked of a device is done, and visible to other processes."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _visible() -> dict[str, int]:
    """The GPUs of this process: UUID -> number."""
    return {_uuid(index): index for index in range(torch.cuda.device_count())}


def _uuid(index: int) -> str:
    return f"GPU-{torch.cuda.get_device_properties(index).uuid}"  # as nvidia-smi has it


def _packed(fields: Sequence[object]) -> tuple[Field, ...]:
    packed: list[Field] = []
    for field in fields:
        if isinstance(field, bytes):
            packed.append(base64.b64encode(field).decode())
        else:
            assert field is None or isinstance(field, int | bool)
            packed.append(field)
    return tuple(packed)


def _unpacked(fields: Sequence[Field]) -> list[bytes | int | bool | None]:
    return [base64.b64decode(field) if isinstance(field, str) else field for field in fields]
