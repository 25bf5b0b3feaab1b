"""What a gateway remembers of the versions that were published through it: one note in the ledger.

A turn of the page is durable before it is seen, so a gateway that is killed goes on with what its
servers were told. `commit` is the commit point of a publication.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import Any

from headway.contracts.config.base import Config
from headway.contracts.errors import NotFound
from headway.contracts.http import WeightRecord
from headway.contracts.types import PolicyVersion
from headway.rollout.ledger.base import Ledger

NOTE = "weights"
KEEP = 16
"""Published versions that can be gone back to."""


class _Page(Config):
    epoch: int = 0
    num_asked: int = 0
    """Servers that the last transaction asked."""
    head: PolicyVersion = 0
    committed: WeightRecord | None = None
    pinned: PolicyVersion | None = None
    kept: tuple[WeightRecord, ...] = ()


class WeightBook:
    """Epoch, head, committed, pinned and kept versions; `digest=None` is a version that nobody proved."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.num_expected = 0
        """Servers that a former process had."""
        self._page = _Page()
        self._turning = asyncio.Lock()

    async def open(self) -> None:
        """Read what a former process wrote."""
        note = await self._ledger.get_note(NOTE)
        if note is not None:
            self._page = _Page.model_validate_json(note)
            self.num_expected = self._page.num_asked

    @property
    def epoch(self) -> int:
        """Number of the last transaction."""
        return self._page.epoch

    @property
    def head(self) -> PolicyVersion:
        """The highest version that was ever recorded: numbers up to it are used up."""
        return self._page.head

    @property
    def committed(self) -> WeightRecord | None:
        """What serves; None before the first publication."""
        return self._page.committed

    @property
    def version(self) -> PolicyVersion:
        """Of what serves."""
        return 0 if self.committed is None else self.committed.version

    @property
    def pinned(self) -> PolicyVersion | None:
        """The version that is held."""
        return self._page.pinned

    @property
    def kept(self) -> tuple[WeightRecord, ...]:
        """Published versions, oldest first."""
        return self._page.kept

    def find(self, version: PolicyVersion) -> WeightRecord:
        """A kept version.

        Raises:
            NotFound: it was never published here, or is too old.
        """
        for record in self.kept:
            if record.version == version:
                return record
        raise NotFound(
            f"version {version} is not kept; kept are {[record.version for record in self.kept]}"
        )

    def knows(self, version: PolicyVersion, path: str) -> bool:
        """Whether exactly this was published."""
        return any((kept.version, kept.path) == (version, path) for kept in self.kept)

    async def next_epoch(self, num_asked: int | None = None) -> int:
        """A number above all that were used, for a transaction that asks so many servers.

        It is not behind the clock: servers obey it even if another gateway, or one with a former
        ledger, has sent them orders.
        """
        async with self._turning:
            epoch = max(self.epoch + 1, int(time.time() * 1000))
            asked = self._page.num_asked if num_asked is None else num_asked
            await self._turn(epoch=epoch, num_asked=asked)
        return epoch

    async def commit(self, record: WeightRecord, pinned: PolicyVersion | None) -> None:
        """This is what serves from now on, on every server that is asked."""
        async with self._turning:
            kept = self._kept_with(record, {record.version, pinned})
            head = max(self.head, record.version)
            await self._turn(committed=record, pinned=pinned, head=head, kept=kept)

    async def keep(self, record: WeightRecord) -> None:
        """Published, but another version is pinned."""
        async with self._turning:
            kept = self._kept_with(record, {self.version, self.pinned})
            await self._turn(head=max(self.head, record.version), kept=kept)

    async def hold(self, pinned: PolicyVersion | None) -> None:
        """Pin what serves, or end the pin."""
        async with self._turning:
            await self._turn(pinned=pinned)

    async def prove(self, record: WeightRecord, digest: str) -> None:
        """The first server has staged a version that was recorded while there was none."""
        async with self._turning:
            if record in self.kept and record.digest is None:
                proven = record.model_copy(update={"digest": digest})
                committed = proven if self.committed == record else self.committed
                await self._turn(committed=committed, kept=_replaced(self.kept, proven))

    async def retract(self, version: PolicyVersion) -> bool:
        """Forget a version that nobody proved: it can never be seen. Its number is free again."""
        async with self._turning:
            kept = tuple(r for r in self.kept if r.version != version or r.digest is not None)
            if kept == self.kept:
                return False
            committed = self.committed
            if committed is not None and committed not in kept:
                committed = kept[-1] if kept else None
            pinned = None if self.pinned == version else self.pinned
            head = max((record.version for record in kept), default=0)
            await self._turn(committed=committed, pinned=pinned, head=head, kept=kept)
            return True

    def _kept_with(
        self, record: WeightRecord, needed: set[PolicyVersion | None]
    ) -> tuple[WeightRecord, ...]:
        if any(kept.version == record.version for kept in self.kept):
            return _replaced(self.kept, record)
        old = [kept for kept in self.kept if kept.version not in needed]
        too_many = {kept.version for kept in old[: max(0, len(self.kept) + 1 - KEEP)]}
        return (*(kept for kept in self.kept if kept.version not in too_many), record)

    async def _turn(self, **changes: Any) -> None:
        page = self._page.model_copy(update=changes)
        await self._ledger.put_note(NOTE, page.model_dump_json())
        self._page = page


def _replaced(kept: Iterable[WeightRecord], record: WeightRecord) -> tuple[WeightRecord, ...]:
    return tuple(record if other.version == record.version else other for other in kept)
