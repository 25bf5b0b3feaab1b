"""Versions laid out as folders, for an engine that reads files by itself.

There are two at most: the version that serves, and the one that is staged; with adapters also what both
were merged into. Nothing is synced to the disk, so an engine reads what was just written from the page
cache: a directory on a tmpfs would be no faster, and would take memory from what is staged. The engine
has to run on this host, as the same user unless the directory was made for both.

What an earlier process left is removed: only what this process verified is trusted. One
receiver per folder; without a name given, each takes a directory of its own, and removes it, also those
of receivers that were killed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headway.contracts.config.weight_sync import StoredSync
from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.channel import StagedWeights, VerifiedVersion
from weight_sync.publisher import StoredPublisher
from weight_sync.store import versions_in
from weight_sync.transports.disk import LocalStore

Held = StagedWeights | VerifiedVersion


class FolderCache:
    """Full versions in a directory of this machine."""

    def __init__(self, folder: str | None) -> None:
        self._is_ours = folder is None
        self._store = own_store() if folder is None else LocalStore(folder, is_durable=False)
        self._publisher = StoredPublisher(self._store, StoredSync())
        self._digests: dict[PolicyVersion, str] = {}
        self._remove_all_but(None)

    def lay_out(self, staged: StagedWeights, served: Held | None) -> VerifiedVersion:
        """A version as a folder, and what it was merged into as another.

        Args:
            staged: replaces what else was staged here.
            served: stays.
        Raises:
            SyncError: the disk is full, or gone.
        """
        self._remove_all_but(served, staged)
        return self._lay_out(staged)

    def collect(self, served: Held) -> None:
        """Remove versions that are neither served nor needed for the next one."""
        self._remove_all_but(served)

    def close(self) -> None:
        """Leave nothing behind, and let another receiver have the folder."""
        self._remove_all_but(None)
        self._publisher.close()
        if self._is_ours:
            shutil.rmtree(self._store.root, ignore_errors=True)

    def _lay_out(self, staged: StagedWeights) -> VerifiedVersion:
        base = staged.base
        if isinstance(base, StagedWeights):
            base = self._lay_out(base)
        if self._digests.get(staged.version) != staged.digest:
            self._digests.pop(staged.version, None)
            self._store.delete(staged.version)
            self._publisher.publish(staged.version, staged.tensors.items())
            self._digests[staged.version] = staged.digest
        folder: Path = self._store.folder(staged.version)
        return VerifiedVersion(staged.version, staged.digest, folder, base, staged.origin)

    def _remove_all_but(self, *kept: Held | None) -> None:
        wanted = {one.version for one in kept if one is not None}
        wanted |= {one.base.version for one in kept if one is not None and one.base is not None}
        for version in versions_in(self._store.names()):
            if version not in wanted:
                self._digests.pop(version, None)
                self._store.delete(version)


def own_store() -> LocalStore:
    """Open a store in a fresh directory; directories that no process holds any more are removed."""
    home = Path(tempfile.gettempdir()) / f"headway-weights-{os.getuid()}"
    try:
        home.mkdir(mode=0o700, exist_ok=True)
        if home.lstat().st_uid != os.getuid():
            raise PermissionError(f"{home} belongs to another user")
        with _alone_in(home):
            for folder in home.iterdir():
                if folder.is_dir():
                    with suppress(SyncError):  # held
                        LocalStore(str(folder), is_durable=False).close()
                        shutil.rmtree(folder, ignore_errors=True)
            return LocalStore(tempfile.mkdtemp(dir=home), is_durable=False)
    except OSError as error:
        raise SyncError(f"cannot lay versions out: {error}; set weights.cache_dir") from error


@contextmanager
def _alone_in(home: Path) -> Iterator[None]:
    """Keep other processes from making or removing directories there."""
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
