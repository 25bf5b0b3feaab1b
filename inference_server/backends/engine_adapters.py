"""LoRA adapters on an engine of SGLang or vLLM, beside the base that it serves.

Each version has a name of its own there: engines keep shared prefixes by name, and a request ends with
the version that it began with. A version that was replaced is unloaded once its requests have ended.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Protocol

from headway.contracts.adapters import not_loaded
from headway.contracts.errors import BackendError, Conflict
from headway.contracts.types import PolicyVersion
from headway.runtime.tasks import cancel_and_wait
from weight_sync.adapter_dir import read_adapter

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """One version of an adapter."""

    engine_name: str
    number: int
    version: PolicyVersion


class AdapterLoader(Protocol):
    """How an engine loads adapters."""

    async def load_adapter(self, name: str, folder: Path) -> int:
        """Load an adapter; returns a number that `unload_adapter` takes.

        Raises:
            SyncError: the engine refused it.
        """

    async def unload_adapter(self, name: str, number: int) -> None:
        """Forget an adapter that no request uses.

        Raises:
            BackendError: the engine does not answer.
        """


class EngineAdapters:
    """What is loaded on one engine; used on one event loop."""

    def __init__(
        self,
        engine: AdapterLoader,
        max_adapters: int,
        until_unused: Callable[[EngineAdapter], Awaitable[None]],
    ) -> None:
        """
        Args:
            until_unused: returns once no request uses a version.
        """
        self._engine = engine
        self._max_adapters = max_adapters
        self._until_unused = until_unused
        self._held: dict[str, EngineAdapter] = {}
        self._mark = uuid.uuid4().hex[:8]
        self._names = count()
        self._replacing: asyncio.Task[None] | None = None

    @property
    def versions(self) -> Mapping[str, PolicyVersion]:
        """Version of each adapter, by name."""
        return {name: one.version for name, one in self._held.items()}

    def find(self, name: str) -> EngineAdapter:
        """Return what serves under a name.

        Raises:
            DataError: nothing does.
        """
        if name not in self._held:
            raise not_loaded(name, self._held)
        return self._held[name]

    async def load(self, name: str, folder: Path, version: PolicyVersion) -> None:
        """See `AdapterBackend`; waits for the requests of the version that was replaced before.

        Raises:
            Conflict, SyncError, BackendError: it was not loaded.
        """
        if name not in self._held and len(self._held) >= self._max_adapters:
            raise Conflict(
                f"backend.max_adapters={self._max_adapters} adapters are loaded; unload one"
            )
        await asyncio.to_thread(read_adapter, folder)  # refuses what would not be plain LoRA
        if self._replacing is not None:
            await self._replacing
        engine_name = f"{name}.{version}.{self._mark}{next(self._names)}"
        number = await self._engine.load_adapter(engine_name, folder)
        replaced = self._held.get(name)
        self._held[name] = EngineAdapter(engine_name, number, version)
        if replaced is not None:
            self._replacing = asyncio.create_task(self._drop(replaced), name="unload an adapter")

    async def unload(self, name: str) -> None:
        """Forget an adapter, whose requests have ended.

        Raises:
            DataError: it is not loaded.
        """
        dropped = self.find(name)
        del self._held[name]
        await self._drop(dropped)

    async def aclose(self) -> None:
        """Leave an engine that goes on as it was."""
        await cancel_and_wait([self._replacing])
        for one in self._held.values():
            await self._take_away(one)
        self._held.clear()

    async def _drop(self, dropped: EngineAdapter) -> None:
        await self._until_unused(dropped)
        await self._take_away(dropped)

    async def _take_away(self, dropped: EngineAdapter) -> None:
        try:
            await self._engine.unload_adapter(dropped.engine_name, dropped.number)
        except BackendError as error:
            log.warning("an adapter stays on the engine", extra={"reason": str(error)})
