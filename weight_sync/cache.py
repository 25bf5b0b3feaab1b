"""Versions laid out as folders, for an engine that reads files by itself.

What an earlier process left there is removed: nothing here is believed but what this process proved.
One receiver per folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from headway.contracts.config.weight_sync import StoredSync
from headway.contracts.types import PolicyVersion
from weight_sync.channel import ProvenVersion, StagedWeights
from weight_sync.publisher import StoredPublisher
from weight_sync.store import versions_in
from weight_sync.transports.disk import LocalStore

KEEP = 2
"""The version that serves, and the one before: an engine may still be reading it."""


class FolderCache:
    """Full versions in a directory of this machine."""

    def __init__(self, folder: str | None) -> None:
        root = folder or tempfile.mkdtemp(prefix="headway-weights-")
        self._store = LocalStore(root, is_durable=False)
        for version in versions_in(self._store.names()):
            self._store.delete(version)
        self._publisher = StoredPublisher(self._store, StoredSync(keep=KEEP))
        self._digests: dict[PolicyVersion, str] = {}

    def lay_out(self, staged: StagedWeights) -> ProvenVersion:
        """A version as a folder, and what it was merged into as another.

        Raises:
            SyncError: the disk is full, or gone.
        """
        base = staged.base
        if isinstance(base, StagedWeights):
            base = self.lay_out(base)
        if self._digests.get(staged.version) != staged.digest:
            self._digests.pop(staged.version, None)
            self._store.delete(staged.version)
            self._publisher.publish(staged.version, staged.tensors.items())
            self._digests[staged.version] = staged.digest
        folder: Path = self._store.folder(staged.version)
        return ProvenVersion(staged.version, staged.digest, folder, base)

    def collect(self, served: StagedWeights | ProvenVersion) -> None:
        """Remove what is neither served, nor needed for the next version."""
        pinned = () if served.base is None else (served.base.version,)
        for version in self._publisher.collect(served.version, pinned):
            self._digests.pop(version, None)

    def close(self) -> None:
        """Let another receiver have the folder."""
        self._publisher.close()
