"""Where gateways that share a ledger tell each other which sessions they opened.

A rollout that one gateway was asked for may be played by another; the one that was asked finds here where
its client must go. What a gateway that died has left is overwritten when its rollout is played anew. The
notes are few, and hold open sessions only.
"""

from __future__ import annotations

import json
from typing import Protocol
from zlib import crc32

from headway.contracts.http.sessions import SessionResponse

SHELVES = 64
"""Notes; sessions that fall on the same one are written one after the other."""


class Notes(Protocol):
    """What is needed of a ledger."""

    async def get_note(self, key: str) -> str | None:
        """A small durable value."""

    async def swap_note(self, key: str, old: str | None, new: str) -> bool:
        """Store it if it is `old` still; whether it was."""


class Board:
    """Open sessions by rollout."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes

    async def find(self, rollout_id: str) -> SessionResponse | None:
        """The session of a rollout, on whichever gateway."""
        told = _read(await self._notes.get_note(_key(rollout_id))).get(rollout_id)
        return None if told is None else SessionResponse.model_validate(told)

    async def post(self, told: SessionResponse) -> None:
        """Tell where a rollout's session is."""
        await self._change(told.rollout_id, told)

    async def take(self, told: SessionResponse) -> None:
        """It has ended; what another gateway posted for the same rollout stays."""
        if await self.find(told.rollout_id) == told:
            await self._change(told.rollout_id, None)

    async def _change(self, rollout_id: str, told: SessionResponse | None) -> None:
        key = _key(rollout_id)
        while True:
            text = await self._notes.get_note(key)
            shelf = _read(text)
            shelf.pop(rollout_id, None)
            if told is not None:
                shelf[rollout_id] = told.model_dump()
            if await self._notes.swap_note(key, text, json.dumps(shelf)):
                return


def _key(rollout_id: str) -> str:
    return f"sessions/{crc32(rollout_id.encode()) % SHELVES}"


def _read(text: str | None) -> dict[str, dict[str, object]]:
    return {} if text is None else json.loads(text)
