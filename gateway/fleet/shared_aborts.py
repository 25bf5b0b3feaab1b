"""Aborts by request id, passed on to the other gateways of a ledger: one of them may have the request."""

from __future__ import annotations

from collections.abc import Callable

from pydantic import NonNegativeInt

from gateway.ledger.base import KeyValueStore
from headway.contracts.config.base import Config

NOTE = "aborts"
MAX_KEPT = 256
"""Aborts that a gateway finds which has not looked for a while."""


class _Aborts(Config):
    count: NonNegativeInt = 0
    """Number of all that there ever were."""
    last: tuple[str | None, ...] = ()
    """The last ones; None ends every request."""


class SharedAborts:
    """Tells other gateways, and hears them with every `follow`."""

    def __init__(self, notes: KeyValueStore) -> None:
        self.end: Callable[[str | None], object] = lambda rid: None
        """Ends a request of this gateway, or all; called for what others ask."""
        self._notes = notes
        self._seen: int | None = None

    async def ask(self, rid: str | None) -> None:
        """Have the others end a request, or all that they have.

        Raises:
            StateError: the ledger cannot be reached.
        """
        if not self._notes.is_shared:
            return
        while True:
            text, aborts = await self._read()
            asked = _Aborts(count=aborts.count + 1, last=(*aborts.last, rid)[-MAX_KEPT:])
            if await self._notes.compare_and_set(NOTE, text, asked.model_dump_json()):
                return

    async def follow(self) -> None:
        """End what others asked for since the last look.

        Raises:
            StateError: the ledger cannot be reached.
        """
        _, aborts = await self._read()
        new = 0 if self._seen is None else aborts.count - self._seen
        self._seen = aborts.count
        for rid in aborts.last[-new:] if new > 0 else ():
            self.end(rid)

    async def _read(self) -> tuple[str | None, _Aborts]:
        text = await self._notes.get_value(NOTE)
        return text, _Aborts() if text is None else _Aborts.model_validate_json(text)
