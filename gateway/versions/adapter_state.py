"""The adapters that a fleet serves beside its base: one note in the ledger of its gateways."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from gateway.ledger.base import KeyValueStore
from headway.contracts.config.base import Config, Identifier
from headway.contracts.types import PolicyVersion

NOTE = "adapters"


class AdapterRecord(Config):
    """One version of an adapter."""

    path: str
    version: PolicyVersion


class _Adapters(Config):
    by_name: dict[Identifier, AdapterRecord] = {}


Records = Mapping[str, AdapterRecord]


class AdapterState:
    """What all servers are to hold; durable before it is seen, and shared by gateways of one ledger."""

    def __init__(self, notes: KeyValueStore) -> None:
        self._notes = notes
        self._records: dict[str, AdapterRecord] = {}
        self._text: str | None = None
        self._updating = asyncio.Lock()

    @property
    def records(self) -> Records:
        """The adapters, by name."""
        return self._records

    async def refresh(self) -> None:
        """Read what a former process wrote, or another gateway.

        Raises:
            StateError: the ledger cannot be reached.
        """
        async with self._updating:
            await self._read()

    async def put(self, name: str, record: AdapterRecord) -> None:
        """Have all servers hold it, now and later."""
        await self._update(lambda records: {**records, name: record})

    async def remove(self, name: str) -> None:
        """Have no server hold it."""
        await self._update(
            lambda records: {other: one for other, one in records.items() if other != name}
        )

    async def _update(self, edit: Callable[[Records], dict[str, AdapterRecord]]) -> None:
        async with self._updating:
            while True:
                records = edit(self._records)
                text = _Adapters(by_name=records).model_dump_json()
                if await self._notes.compare_and_set(NOTE, self._text, text):
                    self._records, self._text = records, text
                    return
                await self._read()

    async def _read(self) -> None:
        text = await self._notes.get_value(NOTE)
        if text != self._text:
            note = _Adapters() if text is None else _Adapters.model_validate_json(text)
            self._records, self._text = note.by_name, text
