"""The versions at a place, as an onlooker sees them: nothing is locked, written or waited for.

A publisher may be writing and deleting meanwhile: a deleted file is None.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from pydantic import ValidationError

from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorEntry,
    parse_manifest,
    parse_part,
    part_name,
)
from weight_sync.store import ANNOUNCEMENT_NAME, Announcement, BlobReader, version_name, versions_in
from weight_sync.transports.base import SCHEMES, local_path, scheme_of
from weight_sync.transports.blob_reuse import Mappings
from weight_sync.transports.disk import LOCK_NAME, open_reader
from weight_sync.transports.shared_memory import SharedMemoryReader

LISTED = ("disk", "shared_memory")
"""Transports that store versions in a directory."""
_OWNER = re.compile(r"process (\d+) on (.+)")


class Catalog:
    """One directory of versions.

    Raises:
        ConfigError: there is none, or it is of a kind that cannot be listed.
    """

    def __init__(self, root: str) -> None:
        transport = SCHEMES.get(scheme_of(root), "disk")
        if transport not in LISTED:
            raise ConfigError(
                f"{root}: what comes over {transport} cannot be listed; name the directory of "
                "the versions (weight_sync.root), on the machine that holds it"
            )
        folder = local_path(root)
        self.root = root
        self.folder: Path | None = None if folder is None else folder.resolve()
        self._is_shared = transport == "shared_memory"
        self._mappings = Mappings(writes=False)
        try:
            url = root if self.folder is None else f"file://{self.folder}"
            self._fs: Any
            self._fs, base = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"{root} cannot be opened: {error}") from error
        self._base = str(base).rstrip("/")
        self._check()

    def versions(self) -> list[PolicyVersion]:
        """Return all versions, incomplete ones too; oldest first."""
        return versions_in(self._names())

    def text(self, version: PolicyVersion, name: str) -> bytes | None:
        """A small file.

        Raises:
            SyncError: it cannot be read.
        """
        try:
            content: bytes = self._fs.cat_file(self._key(version, name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise SyncError(f"cannot read {self.path_of(version)}/{name}: {error}") from error
        return content

    def manifest(self, version: PolicyVersion) -> Manifest | None:
        """None if the version is not complete.

        Raises:
            SyncError: it is damaged.
        """
        text = self.text(version, MANIFEST_NAME)
        if text is None:
            return None
        manifest = parse_manifest(text, f"{self.path_of(version)}/{MANIFEST_NAME}")
        if manifest.version != version:
            raise SyncError(f"{self.path_of(version)} holds version {manifest.version}")
        return manifest

    def announcement(self, version: PolicyVersion) -> Announcement | None:
        """Return the announcement of an incomplete version; None if it has no valid one."""
        text = self.text(version, ANNOUNCEMENT_NAME)
        with suppress(ValidationError):
            return None if text is None else Announcement.model_validate_json(text)
        return None

    def parts(self, version: PolicyVersion) -> Iterator[TensorEntry]:
        """Yield the entries of an incomplete version so far."""
        number = 0
        while (part := self.text(version, part_name(number))) is not None:
            yield from parse_part(part, f"{self.path_of(version)}/{part_name(number)}")
            number += 1

    def written_at(self, version: PolicyVersion) -> float | None:
        """Seconds since 1970 of the newest small file."""
        for name in self._newest_first(version):
            with suppress(OSError, NotImplementedError):
                seconds: float = self._fs.modified(self._key(version, name)).timestamp()
                return seconds
        return None

    def size_of(self, version: PolicyVersion) -> int:
        """Bytes of all its files."""
        with suppress(FileNotFoundError):
            return int(self._fs.du(f"{self._base}/{version_name(version)}"))
        return 0

    def open(self, version: PolicyVersion) -> BlobReader:
        """Open a version for reading; in shared memory its blobs are not overwritten meanwhile."""
        if self._is_shared and self.folder is not None:
            return SharedMemoryReader(self.folder / version_name(version), self._mappings)
        return open_reader(self.path_of(version))

    def path_of(self, version: PolicyVersion) -> str:
        """Directory or URL of a version."""
        at = self.root.rstrip("/") if self.folder is None else str(self.folder)
        return f"{at}/{version_name(version)}"

    def publisher(self) -> str | None:
        """Return the process that is publishing here, as far as this machine can tell."""
        if self.folder is None:
            return None
        lock = self.folder / LOCK_NAME
        with suppress(OSError):
            owner = _OWNER.fullmatch(lock.read_text())
            if owner is not None and owner.group(2) == os.uname().nodename:
                return owner.group(0) if _holds(int(owner.group(1)), lock) else None
        return None

    def _check(self) -> None:
        if not self._fs.isdir(self._base):
            raise ConfigError(f"{self.root} is no directory of versions; name weight_sync.root")
        names = self._names()
        if MANIFEST_NAME in names or ANNOUNCEMENT_NAME in names:
            raise ConfigError(f"{self.root} is one version; name the directory that contains it")
        if LOCK_NAME not in names and not versions_in(names):
            raise ConfigError(f"{self.root} holds no versions; name weight_sync.root")

    def _names(self) -> list[str]:
        try:
            found = self._fs.ls(self._base, detail=False)
        except OSError as error:
            raise SyncError(f"cannot list {self.root}: {error}") from error
        return [str(path).rstrip("/").rpartition("/")[2] for path in found]

    def _newest_first(self, version: PolicyVersion) -> Iterator[str]:
        yield MANIFEST_NAME
        number = 0
        while self._fs.exists(self._key(version, part_name(number))):
            number += 1
        if number:
            yield part_name(number - 1)
        yield ANNOUNCEMENT_NAME

    def _key(self, version: PolicyVersion, name: str) -> str:
        return f"{self._base}/{version_name(version)}/{name}"


def _holds(process: int, lock: Path) -> bool:
    """True if a process of this machine has the lock's file open, or is alive and hides its open
    files.
    """
    files = Path(f"/proc/{process}/fd")
    wanted = lock.stat()
    try:
        for file in files.iterdir():
            with suppress(FileNotFoundError):
                if os.path.samestat(file.stat(), wanted):
                    return True
    except PermissionError:
        return True
    except FileNotFoundError:
        return False
    return False
