"""Versions in memory that a trainer and the servers of its host share.

The layout is that of a directory of versions, on a tmpfs. A server maps the blobs and swaps in tensors
that are in them: the only copy is the publisher's. It holds a shared lock on a blob until
the last tensor in it is gone, so that it is not written again before (`blob_reuse`).
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

import numpy as np
import torch

from headway.contracts.config.weight_sync import ReceiverConfig, SharedMemorySync
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.deadline import Deadline
from weight_sync.publisher import StoredPublisher
from weight_sync.store import StoredSource
from weight_sync.transports.blob_reuse import BlobReuseStore, Mappings
from weight_sync.transports.disk import LocalReader

SCHEME = "shm://"


class SharedMemoryStore(BlobReuseStore):
    """`Store` on a tmpfs."""

    def __init__(self, root: str) -> None:
        super().__init__(root, SCHEME)


class SharedMemoryReader(LocalReader):
    """`BlobReader` on a tmpfs, mapped: tensors share memory with the blob."""

    def __init__(self, folder: Path, mappings: Mappings) -> None:
        super().__init__(folder)
        self._mappings = mappings
        self._leases: dict[str, torch.Tensor] = {}
        self._given: set[tuple[str, int]] = set()

    def read(self, name: str, offset: int, size: int) -> torch.Tensor:
        if size == 0:
            return torch.empty(0, dtype=torch.uint8)
        if (name, offset) in self._given:
            # It was damaged: this process wrote to the mapping, which then hides the file for good.
            return super().read(name, offset, size)
        self._given.add((name, offset))
        if name not in self._leases:
            self._leases[name] = self._lease(name)
        blob = self._leases[name]
        if offset + size > blob.numel():
            raise SyncError(f"{name} is torn: it ends before {offset + size}")
        return blob[offset : offset + size]

    def close(self) -> None:
        self._leases.clear()
        super().close()

    def _lease(self, name: str) -> torch.Tensor:
        """The whole blob, locked until the last tensor in it is gone."""
        try:
            descriptor = os.dup(self._open(name))
        except OSError as error:
            raise SyncError(f"{name} is torn: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            blob = np.frombuffer(self._mappings.map(descriptor), np.uint8)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise SyncError(f"{name} is being written over, or torn: {error}") from error
        weakref.finalize(blob, os.close, descriptor)
        return torch.from_numpy(blob)


class SharedMemoryChannel:
    """`WeightChannel` of one host."""

    schemes = ("shm",)

    def __init__(self) -> None:
        self._mappings = Mappings(writes=False)

    def make_publisher(self, config: SharedMemorySync) -> StoredPublisher:
        return StoredPublisher(SharedMemoryStore(config.root), config)

    def open_source(
        self, path: str, meta: WeightUpdateMeta, config: ReceiverConfig, deadline: Deadline
    ) -> StoredSource:
        folder = Path(path.removeprefix(SCHEME)).resolve()
        self._mappings.prune()
        return StoredSource(SharedMemoryReader(folder, self._mappings), path, deadline)


CHANNEL = SharedMemoryChannel()
