"""Directory of open sessions, shared by the gateways of a ledger.

A rollout that one gateway was asked for may be run by another; the one that was asked finds here where
its client must go. What a gateway that died has left is overwritten when its rollout is run again. The
notes are few, and hold open sessions only.
"""

from __future__ import annotations

import json
from zlib import crc32

from gateway.ledger.base import KeyValueStore
from headway.contracts.http.sessions import SessionResponse

SHELVES = 64
"""Notes; sessions that fall on the same one are written one after the other."""


class SessionDirectory:
    """Open sessions by rollout."""

    def __init__(self, notes: KeyValueStore) -> None:
        self._notes = notes

    async def find(self, rollout_id: str) -> SessionResponse | None:
        """The session of a rollout, on whichever gateway."""
        response = _read(await self._notes.get_value(_key(rollout_id))).get(rollout_id)
        return None if response is None else SessionResponse.model_validate(response)

    async def post(self, response: SessionResponse) -> None:
        """Tell where a rollout's session is."""
        await self._change(response.rollout_id, response)

    async def take(self, response: SessionResponse) -> None:
        """It has ended; what another gateway posted for the same rollout stays."""
        if await self.find(response.rollout_id) == response:
            await self._change(response.rollout_id, None)

    async def _change(self, rollout_id: str, response: SessionResponse | None) -> None:
        key = _key(rollout_id)
        while True:
            text = await self._notes.get_value(key)
            entries = _read(text)
            entries.pop(rollout_id, None)
            if response is not None:
                entries[rollout_id] = response.model_dump()
            if await self._notes.compare_and_set(key, text, json.dumps(entries)):
                return


def _key(rollout_id: str) -> str:
    return f"sessions/{crc32(rollout_id.encode()) % SHELVES}"


def _read(text: str | None) -> dict[str, dict[str, object]]:
    return {} if text is None else json.loads(text)
