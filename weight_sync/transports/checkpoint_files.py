"""The files of a store of versions, in a directory or an object store: named from its root on."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from headway.contracts.checkpoint_store import INDEX_NAME
from headway.runtime.object_stores import is_url, listed, open_objects, os_errors
from weight_sync.transports.disk import FILE_SCHEME, lock_root


class CheckpointFiles(Protocol):
    """Each method may raise `OSError`."""

    root: str

    def names(self, folder: str = "") -> list[str]:
        """What a folder holds; nothing if it is not there."""

    def read(self, file: str) -> bytes:
        """The content of a file."""

    def write(self, file: str, content: bytes) -> None:
        """Write a file that is there whole or not at all, also after a crash."""

    def remove(self, file: str) -> None:
        """Remove a file."""

    def delete(self, folder: str) -> None:
        """Remove as much of a folder as can be."""

    def close(self) -> None:
        """Let another publisher write."""


class DirectoryFiles:
    """`CheckpointFiles` in a directory, which one publisher holds at a time."""

    def __init__(self, root: str) -> None:
        self._root = Path(root.removeprefix(FILE_SCHEME)).resolve()
        self._root.mkdir(parents=True, exist_ok=True)
        self._lock = lock_root(self._root)
        self.root = str(self._root)

    def names(self, folder: str = "") -> list[str]:
        path = self._root / folder
        return [each.name for each in path.iterdir()] if path.is_dir() else []

    def read(self, file: str) -> bytes:
        return (self._root / file).read_bytes()

    def write(self, file: str, content: bytes) -> None:
        path = self._root / file
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        with part.open("wb") as opened:
            opened.write(content)
            opened.flush()
            os.fsync(opened.fileno())
        part.replace(path)

    def remove(self, file: str) -> None:
        (self._root / file).unlink()

    def delete(self, folder: str) -> None:
        shutil.rmtree(self._root / folder, ignore_errors=True)

    def close(self) -> None:
        self._lock.close()


class ObjectFiles:
    """`CheckpointFiles` behind an fsspec URL; nothing keeps a second publisher from it."""

    def __init__(self, url: str) -> None:
        self.root = url.rstrip("/")
        self._objects, self._base = open_objects(self.root)

    def names(self, folder: str = "") -> list[str]:
        with os_errors():
            return list(listed(self._objects, f"{self._base}/{folder}".rstrip("/")))

    def read(self, file: str) -> bytes:
        with os_errors():
            return bytes(self._objects.cat_file(f"{self._base}/{file}"))

    def write(self, file: str, content: bytes) -> None:
        path = f"{self._base}/{file}"
        with os_errors():
            self._objects.makedirs(path.rpartition("/")[0], exist_ok=True)
            self._objects.pipe_file(path, content)

    def remove(self, file: str) -> None:
        with os_errors():
            self._objects.rm_file(f"{self._base}/{file}")

    def delete(self, folder: str) -> None:
        for path in (f"{folder}/{INDEX_NAME}", folder):  # first it is complete no more
            with suppress(OSError), os_errors():
                self._objects.rm(f"{self._base}/{path}", recursive=True)

    def close(self) -> None:
        """Do nothing."""


def open_files(root: str) -> CheckpointFiles:
    """The store at a directory or URL.

    Raises:
        ConfigError: no package is installed that reads the URL.
        SyncError: another publisher has the directory.
    """
    return ObjectFiles(root) if is_url(root) else DirectoryFiles(root)
