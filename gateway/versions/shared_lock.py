"""A lock of all gateways that share a ledger: one of them at a time changes what servers hold.

The holder of the lock changes a note again and again. One whose note has not changed for `lease_s`,
by the clock of the waiting gateway, is dead; no clocks are compared. A holder that was only slow is
stopped by the epochs: servers obey the newest, and `PublicationState.commit` takes no other. A holder
of one's own place (`ledger.owner`) is a former process: this one does not wait for it, and once it has
started, no other does.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from gateway.ledger.base import KeyValueStore
from gateway.ledger.owner import new_owner, place_of
from headway.contracts.errors import ServiceError
from headway.runtime.clock import monotonic
from headway.runtime.tasks import cancel_and_wait

log = logging.getLogger(__name__)

PUBLICATIONS = "publication turn"
ADAPTERS = "adapter turn"
LOOK_S = 0.1
NOBODY = ""


class SharedLock:
    """A lock in a ledger; without others who write to it, a lock in this process."""

    def __init__(
        self, notes: KeyValueStore, lease_s: float, place: str = "", note: str = PUBLICATIONS
    ) -> None:
        """Args:
        note: key of the lock in the ledger.
        """
        self.is_elsewhere = False
        """Another gateway held it when this one last looked."""
        self._notes = notes
        self._lease_s = lease_s
        self._place = place
        self._note = note
        self._name = new_owner(place)
        self._lock = asyncio.Lock()
        self._text: str | None = None
        self._changed_at = 0.0

    @property
    def is_held(self) -> bool:
        """Someone held it when this gateway last looked."""
        return self.is_elsewhere or self._lock.locked()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Wait for the lock, and hold it during the block."""
        async with self._lock:
            if not self._notes.is_shared:
                yield
                return
            await self._take()
            beating = asyncio.create_task(self._beat(), name=f"hold the {self._note}")
            try:
                yield
            finally:
                await cancel_and_wait([beating])
                with suppress(ServiceError):  # it ends by itself
                    await self._give_back()

    async def inherit(self) -> None:
        """Release what a former process of this place held."""
        if self._notes.is_shared:
            await self.look()
            if self._is_former:
                await self._write(NOBODY)

    async def look(self) -> None:
        """See who holds it."""
        text = await self._notes.get_value(self._note)
        if text != self._text:
            self._text, self._changed_at = text, monotonic()
        is_alive = monotonic() - self._changed_at < self._lease_s
        is_other = self._holder not in (NOBODY, self._name) and not self._is_former
        self.is_elsewhere = is_other and is_alive

    @property
    def _holder(self) -> str:
        return NOBODY if self._text is None else str(json.loads(self._text)["holder"])

    @property
    def _is_former(self) -> bool:
        return self._holder != self._name and place_of(self._holder) == self._place != ""

    async def _take(self) -> None:
        while True:
            await self.look()
            if not self.is_elsewhere and await self._write(self._name):
                return
            await asyncio.sleep(LOOK_S)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / 4)
            with suppress(ServiceError):
                if not await self._write(self._name):
                    log.warning("another gateway has taken over", extra={"lock": self._note})
                    return

    async def _give_back(self) -> None:
        await self.look()
        if self._holder == self._name:
            await self._write(NOBODY)

    async def _write(self, holder: str) -> bool:
        text = json.dumps({"holder": holder, "beat": uuid.uuid4().hex})
        if not await self._notes.compare_and_set(self._note, self._text, text):
            return False
        self._text, self._changed_at = text, monotonic()
        return True
