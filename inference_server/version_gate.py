"""Load, prove, swap: how a server changes its version while it generates.

`prepare` reads and proves a version on a thread, `commit` swaps it in between two decode steps,
`abort` forgets it. What a commit does to running sequences is the update policy (`keep`,
`recompute`, `abort`, `drain`). Updates are serial (`_lock`); preparing or committing the same
version again is answered without work.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import StaleVersion, SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from inference_server.backends.base import GenerationBackend, Staged
from weight_sync.channel import WeightReader


class VersionGate:
    """The one door through which weights enter a server."""

    def __init__(
        self,
        backend: GenerationBackend,
        reader: WeightReader | None,
        policy: UpdatePolicy = "keep",
    ) -> None:
        self._backend = backend
        self._reader = reader
        self._policy = policy
        self._staged: Staged | None = None
        self._lock = asyncio.Lock()
        self.updates = 0
        self.updates_in_flight = 0
        self.swap_s = 0.0
        """Seconds spent in swaps, with the wait for what a policy lets end first."""

    @property
    def version(self) -> PolicyVersion:
        """Version that samples the next token."""
        return self._backend.version

    async def prepare(self, meta: WeightUpdateMeta) -> None:
        """Stage a published version while generation goes on.

        Raises:
            SyncError: the version is torn, tampered or of another model; what was staged is dropped.
            StaleVersion: it is not newer than the one that serves.
        """
        reader = self._reader
        if reader is None:
            raise SyncError(
                "this server takes no weights from disk; set weights_root in its config"
            )
        async with self._lock:
            if self._is_known(meta.version):
                return
            self._staged = None
            self._staged = await asyncio.to_thread(self._backend.stage, meta, reader)

    async def commit(self, version: PolicyVersion, policy: UpdatePolicy | None = None) -> int:
        """Swap the staged version in; sequences that were running at that moment.

        Raises:
            SyncError: this version is not staged.
        """
        async with self._lock:
            if version == self._backend.version:
                return 0
            if self._staged is None or self._staged.version != version:
                held = None if self._staged is None else self._staged.version
                raise SyncError(f"version {version} is not prepared here (staged: {held})")
            running = await self._swap(self._staged, policy)
            self._staged = None
            return running

    async def update(
        self,
        number: Callable[[PolicyVersion], PolicyVersion],
        load: Callable[[PolicyVersion], Staged],
        policy: UpdatePolicy | None = None,
    ) -> int:
        """Stage and commit in one turn, between which nobody else's update comes.

        Args:
            number: gives the new version, from the one that serves.
            load: brings it, called on a thread while generation goes on.
            policy: None takes the server's.
        Returns:
            Sequences that were running at the swap.
        Raises:
            StaleVersion: the number is not newer.
            SyncError: by `load` or the swap; the old version serves on.
        """
        async with self._lock:
            version = number(self._backend.version)
            if version <= self._backend.version:
                raise StaleVersion(
                    f"version {version} is not newer than {self._backend.version}, which serves"
                )
            self._staged = None  # what another publisher left here is behind or of the same number
            return await self._swap(await asyncio.to_thread(load, version), policy)

    async def abort(self, version: PolicyVersion) -> None:
        """Forget a staged version; the one that serves goes on."""
        async with self._lock:
            if self._staged is not None and self._staged.version == version:
                self._staged = None

    async def _swap(self, staged: Staged, policy: UpdatePolicy | None) -> int:
        before = time.monotonic()
        running = await self._backend.swap(staged, policy or self._policy)
        self.swap_s += time.monotonic() - before
        self.updates += 1
        self.updates_in_flight += running > 0
        return running

    def _is_known(self, version: PolicyVersion) -> bool:
        if version < self._backend.version:
            raise StaleVersion(
                f"version {version} is older than {self._backend.version}, which serves"
            )
        return version == self._backend.version or (
            self._staged is not None and self._staged.version == version
        )
