"""Load, prove, swap: how a server changes its version while it generates.

`prepare` reads and proves a version on a thread, `commit` swaps it in between two decode steps,
`abort` forgets it. The policy is `keep`: sequences in flight go on under the new weights with their
KV cache; each token carries the version that sampled it. Updates are serial (`_lock`); preparing or
committing the same version again is answered without work.
"""

from __future__ import annotations

import asyncio

from headway.contracts.errors import StaleVersion, SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from inference_server.backends.base import GenerationBackend
from weight_sync.channel import StagedWeights, WeightReader


class VersionGate:
    """The one door through which weights enter a server."""

    def __init__(self, backend: GenerationBackend, reader: WeightReader | None) -> None:
        self._backend = backend
        self._reader = reader
        self._staged: StagedWeights | None = None
        self._lock = asyncio.Lock()
        self.updates_in_flight = 0

    @property
    def version(self) -> PolicyVersion:
        """Version that samples the next token."""
        return self._backend.version

    async def prepare(self, meta: WeightUpdateMeta) -> None:
        """Stage a version while generation goes on.

        Raises:
            SyncError: the version is torn, tampered or of another model; what was staged is dropped.
            StaleVersion: it is not newer than the one that serves.
        """
        async with self._lock:
            if self._is_known(meta.version):
                return
            if self._reader is None:
                raise SyncError("this server takes no weights; set weights_root in its config")
            self._staged = None
            self._staged = await asyncio.to_thread(
                self._reader.stage, meta, self._backend.parameters
            )

    async def commit(self, meta: WeightUpdateMeta) -> int:
        """Swap the staged version in; sequences that were running at that moment.

        Raises:
            SyncError: this version is not staged.
        """
        async with self._lock:
            if meta.version == self._backend.version:
                return 0
            if self._staged is None or self._staged.version != meta.version:
                held = None if self._staged is None else self._staged.version
                raise SyncError(f"version {meta.version} is not prepared here (staged: {held})")
            running = await self._backend.swap(self._staged)
            self._staged = None
            self.updates_in_flight += running > 0
            return running

    async def abort(self, version: PolicyVersion) -> None:
        """Forget a staged version; the one that serves goes on."""
        async with self._lock:
            if self._staged is not None and self._staged.version == version:
                self._staged = None

    def _is_known(self, version: PolicyVersion) -> bool:
        if version < self._backend.version:
            raise StaleVersion(
                f"version {version} is older than {self._backend.version}, which serves"
            )
        return version == self._backend.version or (
            self._staged is not None and self._staged.version == version
        )
