"""Versions as directories on a local or shared filesystem, or in an object store through fsspec.

On a filesystem blobs are written once and synced behind the writer's back; a manifest is renamed into
place when all are durable. An object store makes an object visible when it is complete, so there the
order of writing is all that is needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch

from headway.contracts.config.weight_sync import DiskSync, ReceiverConfig, StoredSync
from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.runtime.model_files import MAX_TEXT_BYTES
from headway.runtime.object_stores import open_objects
from weight_sync.buffers import Buffers
from weight_sync.deadline import Deadline
from weight_sync.manifest import MANIFEST_NAME, TensorEntry, bytes_of
from weight_sync.pieces import Piece, Written, write_checked
from weight_sync.publisher import StoredPublisher
from weight_sync.store import StoredSource, version_name

LOCK_NAME = ".publisher.lock"
FILE_SCHEME = "file://"
_ANEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC


class LocalStore:
    """`Store` in a directory, held by one publisher at a time."""

    def __init__(self, root: str, is_durable: bool = True, scheme: str = "") -> None:
        self.root = Path(root).resolve()
        self._is_durable = is_durable
        self._scheme = scheme
        self.root.mkdir(parents=True, exist_ok=True)
        self._lock = lock_root(self.root)
        self._syncing: list[Future[None]] = []
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="weights-sync")

    def path_of(self, version: PolicyVersion) -> str:
        return f"{self._scheme}{self.root / version_name(version)}"

    def names(self) -> list[str]:
        return [entry.name for entry in self.root.iterdir()]

    def text(self, version: PolicyVersion, name: str) -> bytes | None:
        return _text(f"{self.folder(version)}/{name}")

    def write_text(self, version: PolicyVersion, name: str, text: str) -> None:
        folder = str(self.folder(version))
        is_final = self._is_durable and name == MANIFEST_NAME
        temporary = f"{folder}/.{name}"
        try:
            descriptor = os.open(temporary, _ANEW, 0o644)
        except FileNotFoundError:
            os.mkdir(folder)
            descriptor = os.open(temporary, _ANEW, 0o644)
        try:
            _write_whole(descriptor, memoryview(text.encode()))
            if is_final:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, f"{folder}/{name}")
        if is_final:
            _fsync(folder)
            _fsync(str(self.root))

    def write_blob(
        self, version: PolicyVersion, name: str, pieces: Sequence[Piece]
    ) -> list[Written]:
        descriptor = os.open(
            self.folder(version) / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644
        )
        try:
            written = write_checked(pieces, partial(_write_whole, descriptor))
        except BaseException:
            os.close(descriptor)
            raise
        self._syncing.append(self._syncer.submit(_finish, descriptor, self._is_durable))
        return written

    def sync(self) -> None:
        syncing, self._syncing = self._syncing, []
        failures = [future.exception() for future in syncing]
        for failure in failures:
            if failure is not None:
                raise failure

    def delete(self, version: PolicyVersion) -> None:
        folder = self.folder(version)
        (folder / MANIFEST_NAME).unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._syncer.shutdown()
        self._lock.close()

    def folder(self, version: PolicyVersion) -> Path:
        """Directory of a version."""
        return self.root / version_name(version)


class LocalReader:
    """`Place` in a directory. Bytes are copied: the file may go while its weights still serve."""

    def __init__(self, folder: Path, buffers: Buffers | None = None) -> None:
        self._path = str(folder)
        self._buffers = buffers or Buffers()
        self._files: dict[str, int] = {}

    def text(self, name: str) -> bytes | None:
        try:
            return _text(f"{self._path}/{name}")
        except OSError as error:
            raise SyncError(f"cannot read {self._path}/{name}: {error}") from error

    def expect(self, entries: Sequence[TensorEntry]) -> None:
        """Each is read when it is asked for."""

    def read(self, name: str, offset: int, size: int) -> torch.Tensor:
        try:
            if size > os.fstat(self._open(name)).st_size - offset:  # before memory is taken for it
                raise SyncError(f"{self._path}/{name} is torn: it ends before {offset + size}")
            buffer = self._buffers.take(size)
            view, done = bytes_of(buffer), 0
            while done < size:
                count = os.preadv(self._open(name), [view[done:]], offset + done)
                if count == 0:
                    raise SyncError(f"{self._path}/{name} is torn: it ends before {offset + size}")
                done += count
        except OSError as error:
            raise SyncError(f"{self._path}/{name} is torn: {error}") from error
        return buffer

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _open(self, name: str) -> int:
        if name not in self._files:
            self._files[name] = _open_no_link(f"{self._path}/{name}", os.O_RDONLY)
        return self._files[name]


class ObjectStore:
    """`Store` behind an fsspec URL."""

    def __init__(self, root: str) -> None:
        self._root = root.rstrip("/")
        self._fs, self._base = _filesystem(self._root)

    def path_of(self, version: PolicyVersion) -> str:
        return f"{self._root}/{version_name(version)}"

    def names(self) -> list[str]:
        if not self._fs.exists(self._base):
            return []
        self._fs.invalidate_cache()
        return [
            str(path).rstrip("/").rpartition("/")[2]
            for path in self._fs.ls(self._base, detail=False)
        ]

    def text(self, version: PolicyVersion, name: str) -> bytes | None:
        return _object_text(self._fs, f"{self._base}/{version_name(version)}/{name}")

    def write_text(self, version: PolicyVersion, name: str, text: str) -> None:
        self._fs.pipe_file(self._key(version, name), text.encode())

    def write_blob(
        self, version: PolicyVersion, name: str, pieces: Sequence[Piece]
    ) -> list[Written]:
        with self._fs.open(self._key(version, name), "wb") as file:
            return write_checked(pieces, file.write)

    def sync(self) -> None:
        """An object that was written is durable."""

    def delete(self, version: PolicyVersion) -> None:
        folder = f"{self._base}/{version_name(version)}"
        if self._fs.exists(f"{folder}/{MANIFEST_NAME}"):
            self._fs.rm_file(f"{folder}/{MANIFEST_NAME}")
        if self._fs.exists(folder):
            self._fs.rm(folder, recursive=True)

    def close(self) -> None:
        """Do nothing; the gateway fences a second publisher."""

    def _key(self, version: PolicyVersion, name: str) -> str:
        folder = f"{self._base}/{version_name(version)}"
        self._fs.makedirs(folder, exist_ok=True)
        return f"{folder}/{name}"


class ObjectReader:
    """`Place` behind an fsspec URL."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fs, self._base = _filesystem(path)

    def text(self, name: str) -> bytes | None:
        try:
            return _object_text(self._fs, f"{self._base}/{name}")
        except OSError as error:
            raise SyncError(f"cannot read {self._path}/{name}: {error}") from error

    def expect(self, entries: Sequence[TensorEntry]) -> None:
        """Each is read when it is asked for."""

    def read(self, name: str, offset: int, size: int) -> torch.Tensor:
        try:
            content = (
                self._fs.cat_file(f"{self._base}/{name}", offset, offset + size) if size else b""
            )
        except OSError as error:
            raise SyncError(f"{self._path}/{name} is torn: {error}") from error
        if len(content) != size:
            raise SyncError(f"{self._path}/{name} is torn: it ends before {offset + size}")
        return (
            torch.frombuffer(bytearray(content), dtype=torch.uint8)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )

    def close(self) -> None:
        """Do nothing."""


class DiskChannel:
    """`WeightChannel` of directories and object stores."""

    schemes = ("", "file")

    def __init__(self) -> None:
        self._buffers = Buffers()

    def make_publisher(self, config: DiskSync) -> StoredPublisher:
        return StoredPublisher(make_store(config.root), config)

    def open_source(
        self, path: str, meta: WeightUpdateMeta, config: ReceiverConfig, deadline: Deadline
    ) -> StoredSource:
        return StoredSource(open_reader(path, self._buffers), path, deadline)


CHANNEL = DiskChannel()


def make_store(root: str) -> LocalStore | ObjectStore:
    """The store at a directory or URL."""
    if root.startswith(FILE_SCHEME):
        return LocalStore(root.removeprefix(FILE_SCHEME), scheme=FILE_SCHEME)
    return ObjectStore(root) if "://" in root else LocalStore(root)


def open_reader(path: str, buffers: Buffers | None = None) -> LocalReader | ObjectReader:
    """One version at a directory or URL."""
    path = path.removeprefix(FILE_SCHEME)
    return ObjectReader(path) if "://" in path else LocalReader(Path(path).resolve(), buffers)


def make_local_publisher(root: str, config: StoredSync | None = None) -> StoredPublisher:
    """A publisher into a directory of this machine."""
    return StoredPublisher(LocalStore(root), config or StoredSync())


def lock_root(root: Path) -> IO[str]:
    """Hold a directory of versions for one publisher, until the file is closed.

    Raises:
        SyncError: another one holds it.
    """
    file = (root / LOCK_NAME).open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise SyncError(
            f"{root} has a publisher already ({owner}); end it, or publish elsewhere"
        ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


def _text(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0, opener=_open_no_link) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_TEXT_BYTES:
                raise OSError(errno.EFBIG, f"{size} bytes are more than any manifest has")
            return file.readall()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _open_no_link(path: str, flags: int) -> int:
    """A link could lead out of the allowed directory, and a pipe be waited for without end."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is no regular file", path)
    return descriptor


def _write_whole(descriptor: int, chunk: memoryview) -> None:
    while chunk.nbytes:
        chunk = chunk[os.write(descriptor, chunk) :]


def _finish(descriptor: int, is_durable: bool) -> None:
    try:
        if is_durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _filesystem(url: str) -> tuple[Any, str]:
    try:
        return open_objects(url)
    except ConfigError as error:
        raise SyncError(error.message) from error


def _object_text(filesystem: Any, key: str) -> bytes | None:
    try:
        content: bytes = filesystem.cat_file(key)
    except FileNotFoundError:
        return None
    return content
