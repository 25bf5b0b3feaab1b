"""Stores of versions: one directory of blobs each, in whatever holds the directories.

    root/v00000007/announcement.json   what is being published; written first
    root/v00000007/shard-00000.safetensors, part-00000.json, ...
    root/v00000007/manifest.json       written last: now it is a version

A directory without a manifest was never finished; the next publisher removes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Protocol

import torch
from pydantic import Field, ValidationError

from headway.contracts.config.base import Config
from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.deadline import Deadline
from weight_sync.manifest import (
    MANIFEST_NAME,
    Base,
    Kind,
    Manifest,
    TensorEntry,
    parse_manifest,
    parse_part,
    part_name,
)
from weight_sync.pieces import Piece, Written

ANNOUNCEMENT_NAME = "announcement.json"
_VERSION_NAME = re.compile(r"v(\d{8,18})")


class Announcement(Config):
    """Everything that a receiver must know before the first tensor."""

    version: int = Field(ge=0)
    kind: Kind = "full"
    base: Base | None = None


class Store(Protocol):
    """The publisher's view of a place."""

    def path_of(self, version: PolicyVersion) -> str:
        """Return the path that receivers are given."""

    def names(self) -> list[str]:
        """Names of the directories."""

    def text(self, version: PolicyVersion, name: str) -> bytes | None:
        """A small file; None if it is not there."""

    def write_text(self, version: PolicyVersion, name: str, text: str) -> None:
        """Write a small file at once and whole; durable if the place is.

        Raises:
            OSError: full, or gone.
        """

    def write_blob(
        self, version: PolicyVersion, name: str, pieces: Sequence[Piece]
    ) -> list[Written]:
        """Write a blob; once this returns, it can be read.

        Returns:
            What was found of each piece while it lay in the cache: it costs a tenth of what another
            pass over the memory would.
        Raises:
            OSError: full, or gone.
        """

    def sync(self) -> None:
        """Wait until every blob that was written is durable.

        Raises:
            OSError: one is not.
        """

    def delete(self, version: PolicyVersion) -> None:
        """Delete a version, its manifest first."""

    def close(self) -> None:
        """Let another publisher have the place."""


class BlobReader(Protocol):
    """A receiver's view of one version's directory."""

    def text(self, name: str) -> bytes | None:
        """A small file; None if it is not there (yet).

        Raises:
            SyncError: the directory is gone.
        """

    def expect(self, entries: Sequence[TensorEntry]) -> None:
        """These tensors have come and will most likely be read next, in this order.

        May be called while another thread reads.
        """

    def read(self, name: str, offset: int, size: int) -> torch.Tensor:
        """[size] uint8 of a blob.

        Raises:
            SyncError: the directory is gone, or the blob ends before.
        """

    def close(self) -> None:
        """Let go of files and connections."""


def version_name(version: PolicyVersion) -> str:
    """Directory name of a version."""
    return f"v{version:08d}"


def versions_in(names: Iterable[str]) -> list[PolicyVersion]:
    """Versions among directory names, oldest first."""
    matches = (_VERSION_NAME.fullmatch(name) for name in names)
    return sorted(int(match.group(1)) for match in matches if match)


def with_bases(
    versions: Iterable[PolicyVersion], base_of: Callable[[PolicyVersion], PolicyVersion | None]
) -> set[PolicyVersion]:
    """These versions and all that they are based on, directly or not."""
    found: set[PolicyVersion] = set()
    for version in versions:
        needed: PolicyVersion | None = version
        while needed is not None and needed not in found:
            found.add(needed)
            needed = base_of(needed)
    return found


def surplus_of(
    versions: Sequence[PolicyVersion],
    committed: PolicyVersion,
    num_kept: int,
    needed: Collection[PolicyVersion],
    base_of: Callable[[PolicyVersion], PolicyVersion | None],
) -> list[PolicyVersion]:
    """Return the versions that may be deleted.

    The committed version stays, and newer ones; of older ones the last `num_kept - 1`, those that are
    needed, and whatever any of these is based on.

    Args:
        versions: that are complete, in order.
    """
    older = [version for version in versions if version < committed]
    dropped = set(older[: max(0, len(older) - (num_kept - 1))])
    kept = with_bases({*versions, *needed} - (dropped - set(needed)), base_of)
    return [version for version in versions if version not in kept]


class StoredSource:
    """`Source` of a version directory, also while it is being written."""

    def __init__(self, reader: BlobReader, path: str, deadline: Deadline) -> None:
        self._reader = reader
        self._path = path
        self._deadline = deadline
        self._is_closed = False
        self._manifest = self._find_manifest()
        self.announcement = self._announced()

    def entries(self) -> Iterator[TensorEntry]:
        seen: set[str] = set()
        if self._manifest is None:
            for entries in self._parts():
                seen.update(entry.name for entry in entries)
                yield from entries
        rest = [entry for entry in self.manifest().tensors if entry.name not in seen]
        self._reader.expect(rest)
        yield from rest

    def _parts(self) -> Iterator[Sequence[TensorEntry]]:
        """Each is waited for, and its tensors expected, while those of the one before are read."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="weights-parts")
        try:
            coming = thread.submit(self._part, 0)
            for number in count(1):
                entries = coming.result()
                if entries is None:
                    return
                coming = thread.submit(self._part, number)
                yield entries
        finally:
            thread.shutdown(wait=False, cancel_futures=True)

    def _part(self, number: int) -> Sequence[TensorEntry] | None:
        """Wait for it; None if the manifest came instead."""
        while not self._is_closed:
            part = self._reader.text(part_name(number))
            if part is not None:
                self._deadline.restart()
                entries = parse_part(part, f"{self._path}/{part_name(number)}")
                self._reader.expect(entries)
                return entries
            self._manifest = self._find_manifest()
            if self._manifest is not None:
                return None
            self._deadline.pause()
        raise SyncError(f"the reader of {self._path} was closed")

    def read(self, entry: TensorEntry) -> torch.Tensor:
        payload = self._reader.read(entry.blob, entry.offset, entry.size)
        self._deadline.restart()
        self._deadline.check()  # one that was cancelled ends even while the transfer makes progress
        return payload

    def manifest(self) -> Manifest:
        if self._manifest is None:
            raise SyncError(f"{self._path} is not complete yet")
        return self._manifest

    def close(self) -> None:
        self._is_closed = True
        self._reader.close()

    def _find_manifest(self) -> Manifest | None:
        text = self._reader.text(MANIFEST_NAME)
        return None if text is None else parse_manifest(text, f"{self._path}/{MANIFEST_NAME}")

    def _announced(self) -> Announcement:
        if self._manifest is not None:
            known = self._manifest
            return Announcement(version=known.version, kind=known.kind, base=known.base)
        text = self._reader.text(ANNOUNCEMENT_NAME)
        if text is None:
            raise SyncError(
                f"there is no version at {self._path}: neither {MANIFEST_NAME} nor {ANNOUNCEMENT_NAME}"
            )
        try:
            found = Announcement.model_validate_json(text)
        except ValidationError as error:
            raise SyncError(
                f"{self._path}/{ANNOUNCEMENT_NAME} is damaged: {error.errors()[0]['msg']}"
            ) from error
        if found.base is not None and found.base.version >= found.version:
            raise SyncError(
                f"{self._path} builds on version {found.base.version}, which is not older"
            )
        return found
