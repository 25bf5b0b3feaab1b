"""Notes of a ledger that several gateways share, in memory."""

from __future__ import annotations

import asyncio

from headway.contracts.errors import StateError


class SharedNotes:
    """Notes that others write, too."""

    is_shared = True

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.is_away = False

    async def get_value(self, key: str) -> str | None:
        await asyncio.sleep(0)
        self._check()
        return self.notes.get(key)

    async def set_value(self, key: str, value: str) -> None:
        await self.compare_and_set(key, await self.get_value(key), value)

    async def compare_and_set(self, key: str, old: str | None, new: str) -> bool:
        await asyncio.sleep(0)
        self._check()
        if self.notes.get(key) != old:
            return False
        self.notes[key] = new
        return True

    def _check(self) -> None:
        if self.is_away:
            raise StateError("away")
