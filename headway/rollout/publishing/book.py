"""What gateways remember of the versions that were published through them: one note in their ledger.

A turn of the page is durable before it is seen, so a gateway that is killed goes on with what its
servers were told. `commit` is the commit point of a publication.

Gateways with one ledger have one book: a page is turned by compare and set, so epochs are unique and
only grow, and `refresh` shows what others wrote. Whose epoch is not the newest any more commits nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from headway.contracts.config.base import Config
from headway.contracts.errors import Fenced, NotFound
from headway.contracts.http.weights import WeightRecord, WeightReservation
from headway.contracts.types import PolicyVersion
from headway.rollout.signal import Signal

NOTE = "weights"
KEEP = 16
"""Published versions that can be gone back to."""


class Notes(Protocol):
    """The part of a ledger that holds small durable values."""

    is_shared: bool
    """Whether other gateways write them, too."""

    async def get_note(self, key: str) -> str | None: ...

    async def swap_note(self, key: str, old: str | None, new: str) -> bool: ...


class _Page(Config):
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
    """Times that a reservation was asked for: what does not grow has nobody who wants it."""


Edit = Callable[[_Page], dict[str, Any] | None]
"""What a page becomes; None leaves it."""


class WeightBook:
    """Epoch, head, committed, pinned and kept versions; `digest=None` is a version that nobody proved."""

    def __init__(self, notes: Notes) -> None:
        self.notes = notes
        self.turned = Signal()
        """Raised when another version serves, or is the newest, or is pinned."""
        self.num_expected = 0
        """Servers that a former process had."""
        self.repeated_at = time.monotonic()
        """When this process saw the reservation being asked for."""
        self._page = _Page()
        self._text: str | None = None
        self._own_epoch = 0
        self._turning = asyncio.Lock()

    async def open(self) -> None:
        """Read what a former process wrote."""
        await self.refresh()
        self.num_expected = self._page.num_asked
        self._own_epoch = self.epoch

    async def refresh(self) -> None:
        """Read what other gateways wrote."""
        async with self._turning:
            await self._read()

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
    def reserved(self) -> WeightReservation | None:
        """Who wants servers to stay at which version."""
        return self._page.reserved

    @property
    def seats(self) -> tuple[str, ...]:
        """The servers that do."""
        return self._page.seats

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

        def edit(page: _Page) -> dict[str, Any]:
            epoch = max(page.epoch + 1, int(time.time() * 1000))
            return {
                "epoch": epoch,
                "num_asked": page.num_asked if num_asked is None else num_asked,
            }

        async with self._turning:
            await self._turn(edit)
            self._own_epoch = self.epoch
            return self.epoch

    async def commit(
        self, record: WeightRecord, pinned: PolicyVersion | None, swapped: Iterable[str] = ()
    ) -> None:
        """This is what serves from now on, on every server that is asked.

        Raises:
            Fenced: another gateway has begun a transaction since this one's.
        """

        def edit(page: _Page) -> dict[str, Any]:
            if page.epoch != self._own_epoch:
                raise Fenced(
                    f"version {record.version} was staged in epoch {self._own_epoch}; another gateway "
                    f"has begun epoch {page.epoch}"
                )
            return {
                "committed": record,
                "pinned": pinned,
                "head": max(page.head, record.version),
                "kept": _kept_with(page, record, {record.version, pinned}),
                "swapped": tuple(swapped),
            }

        async with self._turning:
            await self._turn(edit)

    def was_swapped(self, server_id: str) -> bool:
        """Whether a server was to swap to what is committed, when that was recorded."""
        return server_id in self._page.swapped

    async def keep(self, record: WeightRecord) -> None:
        """Published, but another version is pinned."""

        def edit(page: _Page) -> dict[str, Any]:
            serving = None if page.committed is None else page.committed.version
            kept = _kept_with(page, record, {serving, page.pinned})
            return {"head": max(page.head, record.version), "kept": kept}

        async with self._turning:
            await self._turn(edit)

    async def hold(self, pinned: PolicyVersion | None) -> None:
        """Pin what serves, or end the pin."""
        async with self._turning:
            await self._turn(lambda page: {"pinned": pinned})

    async def reserve(self, wanted: WeightReservation | None, seats: Iterable[str] = ()) -> None:
        """These servers stay at a version from now on; None ends that."""
        held = tuple(seats)
        async with self._turning:
            await self._turn(
                lambda page: {"reserved": wanted, "seats": held, "repeats": page.repeats + 1}
            )

    async def prove(self, record: WeightRecord, digest: str) -> None:
        """The first server has staged a version that was recorded while there was none."""

        def edit(page: _Page) -> dict[str, Any] | None:
            if record not in page.kept or record.digest is not None:
                return None
            proven = record.model_copy(update={"digest": digest})
            committed = proven if page.committed == record else page.committed
            return {"committed": committed, "kept": _replaced(page.kept, proven)}

        async with self._turning:
            await self._turn(edit)

    async def retract(self, version: PolicyVersion) -> bool:
        """Forget a version that nobody proved: it can never be seen. Its number is free again."""

        def edit(page: _Page) -> dict[str, Any] | None:
            kept = tuple(r for r in page.kept if r.version != version or r.digest is not None)
            if kept == page.kept:
                return None
            committed = page.committed
            if committed is not None and committed not in kept:
                committed = kept[-1] if kept else None
            return {
                "committed": committed,
                "pinned": None if page.pinned == version else page.pinned,
                "head": max((record.version for record in kept), default=0),
                "kept": kept,
            }

        async with self._turning:
            return await self._turn(edit)

    async def _turn(self, edit: Edit) -> bool:
        """Whether there was anything to change."""
        while (changes := edit(self._page)) is not None:
            page = self._page.model_copy(update=changes)
            text = page.model_dump_json()
            if await self.notes.swap_note(NOTE, self._text, text):
                self._show(page, text)
                return True
            await self._read()
        return False

    async def _read(self) -> None:
        text = await self.notes.get_note(NOTE)
        if text != self._text:
            self._show(_Page() if text is None else _Page.model_validate_json(text), text)

    def _show(self, page: _Page, text: str | None) -> None:
        before, self._page, self._text = self._page, page, text
        if page.repeats != before.repeats:
            self.repeated_at = time.monotonic()
        if (before.committed, before.head, before.pinned) != (
            page.committed,
            page.head,
            page.pinned,
        ):
            self.turned.notify()


def _kept_with(
    page: _Page, record: WeightRecord, needed: set[PolicyVersion | None]
) -> tuple[WeightRecord, ...]:
    if any(kept.version == record.version for kept in page.kept):
        return _replaced(page.kept, record)
    needed = needed | ({page.reserved.version} if page.reserved else set())
    old = [kept for kept in page.kept if kept.version not in needed]
    too_many = {kept.version for kept in old[: max(0, len(page.kept) + 1 - KEEP)]}
    return (*(kept for kept in page.kept if kept.version not in too_many), record)


def _replaced(kept: Iterable[WeightRecord], record: WeightRecord) -> tuple[WeightRecord, ...]:
    return tuple(record if other.version == record.version else other for other in kept)
