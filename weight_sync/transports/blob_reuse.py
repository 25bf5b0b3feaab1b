"""Blobs that are written again: memory that was touched before is three times faster to write and to map.

The blobs of deleted versions are written in place for later ones of the same size, and their mappings
are kept. A reader of a blob holds a shared lock (`flock`) on it, which ends with its process, too;
a blob is written again only under the exclusive lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headway.contracts.types import PolicyVersion
from weight_sync.manifest import MANIFEST_NAME
from weight_sync.pieces import Piece, Written, write_checked
from weight_sync.transports.disk import LocalStore

FREE_NAME = ".free"
ACCESS = mmap.PROT_READ | mmap.PROT_WRITE

_FileId = tuple[int, int]


class Mappings:
    """Files that this process has mapped, by device and inode."""

    def __init__(self, writes: bool) -> None:
        self._flags = os.O_RDWR if writes else os.O_RDONLY
        # Private and writable on paper for readers, too: torch knows no tensor that is read-only.
        self._share = mmap.MAP_SHARED if writes else mmap.MAP_PRIVATE
        self._known: dict[_FileId, tuple[int, mmap.mmap]] = {}
        self._lock = threading.Lock()

    def map(self, descriptor: int) -> mmap.mmap:
        """Return the file behind a descriptor; mapped again only if it was not, or with another size."""
        found = os.fstat(descriptor)
        key = (found.st_dev, found.st_ino)
        with self._lock:
            if key in self._known:
                mapped = self._known[key][1]
                if len(mapped) == found.st_size:
                    return mapped
                os.close(self._known.pop(key)[0])
            # Opened again: a lock belongs to an open file, and this one stays open.
            file = os.open(f"/proc/self/fd/{descriptor}", self._flags)
            try:
                mapped = mmap.mmap(file, found.st_size, self._share, ACCESS)
            except BaseException:
                os.close(file)
                raise
            self._known[key] = (file, mapped)
            return mapped

    def close(self) -> None:
        """Let go of all; tensors in them keep the memory alive."""
        with self._lock:
            while self._known:
                os.close(self._known.popitem()[1][0])

    def prune(self) -> None:
        """Let go of what was deleted."""
        with self._lock:
            known = self._known.items()
            gone = [key for key, (file, _) in known if os.fstat(file).st_nlink == 0]
            for key in gone:
                os.close(self._known.pop(key)[0])  # tensors in it keep the memory alive


class BlobReuseStore(LocalStore):
    """`Store` in a directory, best on a tmpfs, whose blobs are written again; nothing is durable."""

    def __init__(self, root: str, scheme: str = "") -> None:
        super().__init__(root, is_durable=False, scheme=scheme)
        self._free = _FreeBlobs(self.root / FREE_NAME)
        self._mappings = Mappings(writes=True)

    def write_blob(
        self, version: PolicyVersion, name: str, pieces: Sequence[Piece]
    ) -> list[Written]:
        size = sum(piece.data.nbytes for piece in pieces)
        path = self.folder(version) / name
        if size == 0:  # nothing can be mapped
            path.touch()
            return write_checked(pieces, len)
        descriptor = self._free.take(size, path)
        if descriptor is None:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_size != size:
                self._reserve(descriptor, size)
            target = np.frombuffer(self._mappings.map(descriptor), np.uint8)
            return write_checked(pieces, _Cursor(target).write)
        finally:
            os.close(descriptor)

    def delete(self, version: PolicyVersion) -> None:
        folder = self.folder(version)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        blobs = list(folder.glob("*.safetensors")) + list(folder.glob("*.bin"))
        if blobs:
            self._forget_free()
        for blob in blobs:
            with suppress(FileNotFoundError):
                self._free.add(blob)
        super().delete(version)

    def close(self) -> None:
        self._mappings.close()
        super().close()

    def _reserve(self, descriptor: int, size: int) -> None:
        """A full tmpfs is an error here, and would be the end of the process when it is written."""
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError:
            self._forget_free()
            os.posix_fallocate(descriptor, 0, size)

    def _forget_free(self) -> None:
        self._free.clear()
        self._mappings.prune()


class _FreeBlobs:
    """Retired blobs in a directory of their own, by size; any thread may take one."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of_size: dict[int, list[Path]] = {}
        self._lock = threading.Lock()
        folder.mkdir(exist_ok=True)
        for blob in folder.iterdir():
            self._of_size.setdefault(blob.stat().st_size, []).append(blob)

    def add(self, blob: Path) -> None:
        """Move a blob here; readers may go on reading it.

        Raises:
            FileNotFoundError: it is gone.
        """
        retired = blob.rename(self._folder / uuid.uuid4().hex)
        with self._lock:
            self._of_size.setdefault(retired.stat().st_size, []).append(retired)

    def take(self, size: int, path: Path) -> int | None:
        """Move a blob of this size that has no reader to `path`; it is open, and locked.

        Raises:
            OSError: it cannot be moved there.
        """
        with self._lock:
            fitting = self._of_size.get(size, [])
            for blob in list(fitting):
                try:
                    descriptor = os.open(blob, os.O_RDWR)
                except FileNotFoundError:  # it was removed by hand
                    fitting.remove(blob)
                    continue
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    blob.rename(path)
                except BlockingIOError:  # in use
                    os.close(descriptor)
                except BaseException:
                    os.close(descriptor)
                    raise
                else:
                    fitting.remove(blob)
                    return descriptor
            return None

    def clear(self) -> None:
        """Delete all; readers may go on reading them."""
        with self._lock:
            self._of_size.clear()
            for blob in self._folder.iterdir():
                blob.unlink(missing_ok=True)


class _Cursor:
    """Position of the next chunk."""

    def __init__(self, target: NDArray[np.uint8]) -> None:
        self._target = target
        self._at = 0

    def write(self, chunk: memoryview) -> None:
        end = self._at + chunk.nbytes
        np.copyto(self._target[self._at : end], np.frombuffer(chunk, np.uint8))
        self._at = end
