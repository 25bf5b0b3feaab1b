"""State of the versions that were published through gateways: one note in their ledger.

A change of the record is durable before it is seen, so a gateway that is killed goes on with what its
servers were told. `commit` is the commit point of a publication.

Gateways with one ledger share one record, changed by compare and set: epochs are unique and
only grow, and `refresh` shows what others wrote. A gateway whose epoch is not the newest any more
commits nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from gateway.ledger.base import KeyValueStore
from headway.contracts.config.base import Config
from headway.contracts.errors import Fenced, NotFound
from headway.contracts.http.weights import WeightRecord, WeightReservation
from headway.contracts.types import PolicyVersion
from headway.runtime.clock import monotonic
from headway.runtime.tasks import Signal

NOTE = "weights"
KEEP = 16
"""Published versions that can be gone back to."""


class _PublicationRecord(Config):
    epoch: int = 0
    num_asked: int = 0
    """Servers that the last transaction asked."""
    head: PolicyVersion = 0
    committed: WeightRecord | None = None
    pinned: PolicyVersion | None = None
    kept: tuple[WeightRecord, ...] = ()
    swapped: tuple[str, ...] = ()
    """Servers that were to swap to what is committed; the others are to catch up."""
    reserved: WeightReservation | None = None
    seats: tuple[str, ...] = ()
    """Servers that stay at the reserved version."""
    repeats: int = 0
    """Number of times that a reservation was asked for: one that does not grow is not wanted any more."""


Edit = Callable[[_PublicationRecord], dict[str, Any] | None]
"""Function that returns the changed fields of a record; None leaves it."""


class PublicationState:
    """Epoch, head, committed, pinned and kept versions; `digest=None` is a version that was not
    verified."""

    def __init__(self, notes: KeyValueStore) -> None:
        self.notes = notes
        self.changed = Signal()
        """Raised when another version serves, or is the newest, or is pinned."""
        self.newest: PolicyVersion = 0
        """The highest head that this process has seen, also of what was retracted or lost since."""
        self.num_expected = 0
        """Servers that a former process had."""
        self.repeated_at = monotonic()
        """Time when this process saw the reservation being asked for."""
        self._record = _PublicationRecord()
        self._text: str | None = None
        self._own_epoch = 0
        self._updating = asyncio.Lock()

    async def open(self) -> None:
        """Read what a former process wrote."""
        await self.refresh()
        self.num_expected = self._record.num_asked
        self._own_epoch = self.epoch

    async def refresh(self) -> None:
        """Read what other gateways wrote."""
        async with self._updating:
            await self._read()

    @property
    def epoch(self) -> int:
        """Number of the last transaction."""
        return self._record.epoch

    @property
    def head(self) -> PolicyVersion:
        """The highest version that was ever recorded: numbers up to it are used up."""
        return self._record.head

    @property
    def committed(self) -> WeightRecord | None:
        """The version that serves; None before the first publication."""
        return self._record.committed

    @property
    def version(self) -> PolicyVersion:
        """Number of the version that serves."""
        return 0 if self.committed is None else self.committed.version

    @property
    def pinned(self) -> PolicyVersion | None:
        """The version that is held."""
        return self._record.pinned

    @property
    def reserved(self) -> WeightReservation | None:
        """The reservation: a name, and the version at which some servers stay."""
        return self._record.reserved

    @property
    def reserved_servers(self) -> tuple[str, ...]:
        """The servers that do."""
        return self._record.seats

    @property
    def kept(self) -> tuple[WeightRecord, ...]:
        """Published versions, oldest first."""
        return self._record.kept

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
        """True if exactly this was published."""
        return any((kept.version, kept.path) == (version, path) for kept in self.kept)

    async def next_epoch(self, num_asked: int | None = None) -> int:
        """A number above all that were used, for a transaction that asks so many servers.

        It is not behind the clock: servers obey it even if another gateway, or one with a former
        ledger, has sent them orders.
        """

        def edit(current: _PublicationRecord) -> dict[str, Any]:
            epoch = max(current.epoch + 1, int(time.time() * 1000))
            return {
                "epoch": epoch,
                "num_asked": current.num_asked if num_asked is None else num_asked,
            }

        async with self._updating:
            await self._update(edit)
            self._own_epoch = self.epoch
            return self.epoch

    async def commit(
        self, record: WeightRecord, pinned: PolicyVersion | None, swapped: Iterable[str] = ()
    ) -> None:
        """This is what serves from now on, on every server that is asked.

        Raises:
            Fenced: another gateway has begun a transaction since this one's.
        """

        def edit(current: _PublicationRecord) -> dict[str, Any]:
            if current.epoch != self._own_epoch:
                raise Fenced(
                    f"version {record.version} was staged in epoch {self._own_epoch}; another gateway "
                    f"has begun epoch {current.epoch}"
                )
            return {
                "committed": record,
                "pinned": pinned,
                "head": max(current.head, record.version),
                "kept": _kept_with(current, record, {record.version, pinned}),
                "swapped": tuple(swapped),
            }

        async with self._updating:
            await self._update(edit)

    def was_swapped(self, server_id: str) -> bool:
        """True if a server was to swap to the committed version, when that was recorded."""
        return server_id in self._record.swapped

    async def keep(self, record: WeightRecord) -> None:
        """Published, but another version is pinned."""

        def edit(current: _PublicationRecord) -> dict[str, Any]:
            serving = None if current.committed is None else current.committed.version
            kept = _kept_with(current, record, {serving, current.pinned})
            return {"head": max(current.head, record.version), "kept": kept}

        async with self._updating:
            await self._update(edit)

    async def rename(self, label: str) -> None:
        """Name what serves.

        Raises:
            NotFound: nothing was published.
        """

        def edit(current: _PublicationRecord) -> dict[str, Any]:
            if current.committed is None:
                raise NotFound(
                    "no version was published yet; the one from the start keeps its name"
                )
            renamed = current.committed.model_copy(update={"label": label})
            return {"committed": renamed, "kept": _replaced(current.kept, renamed)}

        async with self._updating:
            await self._update(edit)

    async def hold(self, pinned: PolicyVersion | None) -> None:
        """Pin what serves, or end the pin."""
        async with self._updating:
            await self._update(lambda current: {"pinned": pinned})

    async def reserve(self, wanted: WeightReservation | None, servers: Iterable[str] = ()) -> None:
        """These servers stay at a version from now on; None ends that."""
        held = tuple(servers)
        async with self._updating:
            await self._update(
                lambda current: {"reserved": wanted, "seats": held, "repeats": current.repeats + 1}
            )

    async def prove(self, record: WeightRecord, digest: str) -> None:
        """The first server has staged a version that was recorded while there was none."""

        def edit(current: _PublicationRecord) -> dict[str, Any] | None:
            if record not in current.kept or record.digest is not None:
                return None
            proven = record.model_copy(update={"digest": digest})
            committed = proven if current.committed == record else current.committed
            return {"committed": committed, "kept": _replaced(current.kept, proven)}

        async with self._updating:
            await self._update(edit)

    async def retract(self, version: PolicyVersion) -> bool:
        """Forget a version that was not verified: it can never be seen. Its number is free again."""

        def edit(current: _PublicationRecord) -> dict[str, Any] | None:
            kept = tuple(r for r in current.kept if r.version != version or r.digest is not None)
            if kept == current.kept:
                return None
            committed = current.committed
            if committed is not None and committed not in kept:
                committed = kept[-1] if kept else None
            return {
                "committed": committed,
                "pinned": None if current.pinned == version else current.pinned,
                "head": max((record.version for record in kept), default=0),
                "kept": kept,
            }

        async with self._updating:
            return await self._update(edit)

    async def _update(self, edit: Edit) -> bool:
        """Change the record; return True if there was anything to change."""
        while (changes := edit(self._record)) is not None:
            current = self._record.model_copy(update=changes)
            text = current.model_dump_json()
            if await self.notes.compare_and_set(NOTE, self._text, text):
                self._show(current, text)
                return True
            await self._read()
        return False

    async def _read(self) -> None:
        text = await self.notes.get_value(NOTE)
        if text != self._text:
            self._show(
                _PublicationRecord()
                if text is None
                else _PublicationRecord.model_validate_json(text),
                text,
            )

    def _show(self, current: _PublicationRecord, text: str | None) -> None:
        before, self._record, self._text = self._record, current, text
        self.newest = max(self.newest, current.head)
        if current.repeats != before.repeats:
            self.repeated_at = monotonic()
        if (before.committed, before.head, before.pinned) != (
            current.committed,
            current.head,
            current.pinned,
        ):
            self.changed.notify()


def _kept_with(
    current: _PublicationRecord, record: WeightRecord, needed: set[PolicyVersion | None]
) -> tuple[WeightRecord, ...]:
    if any(kept.version == record.version for kept in current.kept):
        return _replaced(current.kept, record)
    needed = needed | ({current.reserved.version} if current.reserved else set())
    old = [kept for kept in current.kept if kept.version not in needed]
    too_many = {kept.version for kept in old[: max(0, len(current.kept) + 1 - KEEP)]}
    return (*(kept for kept in current.kept if kept.version not in too_many), record)


def _replaced(kept: Iterable[WeightRecord], record: WeightRecord) -> tuple[WeightRecord, ...]:
    return tuple(record if other.version == record.version else other for other in kept)
