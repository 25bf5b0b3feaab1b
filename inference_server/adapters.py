"""The adapters that a server holds beside its base: read from directories, served under names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from headway.contracts.adapters import next_adapter_version, not_loaded
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import DataError, SyncError
from headway.contracts.types import PolicyVersion
from inference_server.backends.base import GenerationBackend
from weight_sync.transports.base import check_allowed, local_path


@runtime_checkable
class AdapterBackend(Protocol):
    """A generation backend that serves adapters beside its base."""

    @property
    def adapters(self) -> Mapping[str, PolicyVersion]:
        """Version of each loaded adapter, by name."""

    @property
    def max_adapters(self) -> int:
        """Maximum number of adapters that can be loaded."""

    async def load_adapter(self, name: str, folder: Path, version: PolicyVersion) -> None:
        """Serve an adapter under a name, or another version of it; others are not touched.

        Args:
            folder: as `peft` saves it.
        Raises:
            SyncError: it cannot be read, is no plain LoRA, or does not fit the model.
            Conflict: too many others are loaded.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter; its requests end with the tokens so far.

        Raises:
            DataError: it is not loaded.
        """


class Adapters:
    """`AdapterHost` of one server."""

    def __init__(self, backend: GenerationBackend, receiver: ReceiverConfig) -> None:
        """
        Args:
            receiver: `allow` says where they may be read.
        """
        self._backend = backend
        self._receiver = receiver
        self._lock = asyncio.Lock()

    @property
    def versions(self) -> Mapping[str, PolicyVersion]:
        """Version of each loaded adapter, by name."""
        return self._backend.adapters if isinstance(self._backend, AdapterBackend) else {}

    @property
    def max_adapters(self) -> int:
        """See `AdapterHost`."""
        return self._backend.max_adapters if isinstance(self._backend, AdapterBackend) else 0

    def version(self, name: str) -> PolicyVersion:
        """Return the version of an adapter.

        Raises:
            DataError: it is not loaded, or the backend serves none.
        """
        versions = self._able().adapters
        if name not in versions:
            raise not_loaded(name, versions)
        return versions[name]

    async def load(
        self, name: str, path: str, version: PolicyVersion | None = None
    ) -> PolicyVersion:
        """See `AdapterHost`; the directory is below one of `weights.allow`."""
        backend = self._able()
        if not backend.max_adapters:
            raise DataError("this server serves no adapters; set backend.max_adapters")
        check_allowed(path, self._receiver)
        folder = local_path(path)
        if folder is None:
            raise SyncError(f"an adapter is read from a directory, and {path} is none")
        async with self._lock:
            version = next_adapter_version(name, backend.adapters.get(name, 0), version)
            await backend.load_adapter(name, folder, version)
        return version

    async def unload(self, name: str) -> None:
        """See `AdapterHost`."""
        async with self._lock:
            await self._able().unload_adapter(name)

    def _able(self) -> AdapterBackend:
        if isinstance(self._backend, AdapterBackend):
            return self._backend
        raise DataError(
            "this server's backend serves no adapters beside its base; use embedded_torch, sglang or "
            "vllm, or publish the adapter as a version"
        )
