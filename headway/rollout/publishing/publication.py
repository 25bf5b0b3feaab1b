"""Publications: a version is staged on every server, recorded, and then swapped in on all of them.

    announce ─► prepare ─► digests agree, quorum ─► RECORD ─► commit ─► ack
                   └─────► abort: the old version goes on serving

- One transaction at a time (`_turn`), over all gateways that share a ledger; each has an epoch, durable
  before the first server hears of it. Servers obey the highest epoch, so what is left of an
  interrupted transaction cannot commit.
- `RECORD` (`WeightBook.commit`) is the commit point. Killed before it, the gateway comes back with the
  old version, and the publisher's repeat finds what servers have staged. Killed after it, it comes
  back with the new one, and who had not committed is caught up.
- It concerns the servers that are `ready` when it begins; all others catch up (`catch_up`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import Conflict, ServiceError, StaleVersion
from headway.contracts.http.weights import (
    ReservationStatus,
    WeightRecord,
    WeightReservation,
    WeightStatus,
)
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.rollout.fleet.members import Member, Members
from headway.rollout.publishing.book import WeightBook
from headway.rollout.publishing.catch_up import CatchUp
from headway.rollout.publishing.metrics import PublicationMetrics
from headway.rollout.publishing.orders import WeightOrders, is_group
from headway.rollout.publishing.reservation import Reservation
from headway.rollout.publishing.staging import Change, Staged, Staging
from headway.rollout.publishing.turn import PublicationTurn

log = logging.getLogger(__name__)

T = TypeVar("T")


class Publications:
    """The one place that changes the version of a fleet; used on one event loop."""

    def __init__(
        self,
        config: FleetConfig,
        members: Members,
        book: WeightBook,
        metrics: CollectorRegistry,
        place: str = "",
    ) -> None:
        self.updates_in_flight = 0
        self._is_rolling = config.commit_order == "rolling"
        self._members = members
        self._book = book
        self._orders = WeightOrders(config, members)
        self._staging = Staging(config, members, book, self._orders)
        self._reservation = Reservation(members, book)
        self._catch_up = CatchUp(members, book, self._orders, self._reservation)
        self._turn = PublicationTurn(book.notes, config.lease_s, place)
        self._publishing: PolicyVersion | None = None
        self._is_committing = False
        self._metrics = PublicationMetrics(metrics, self.status)

    async def start(self) -> None:
        """End what a former process was at.

        Raises:
            StateError: the ledger cannot be reached.
        """
        await self._turn.inherit()

    def status(self) -> WeightStatus:
        """A picture of the book now."""
        book = self._book
        return WeightStatus(
            committed=book.committed,
            head=book.head,
            epoch=book.epoch,
            pinned=book.pinned,
            reserved=self._reservation.version,
            publishing=self._publishing,
            kept=list(book.kept),
        )

    async def publish(self, meta: WeightUpdateMeta, policy: UpdatePolicy | None) -> PolicyVersion:
        """See `Generator.update_weights`."""
        async with self._alone():
            book = self._book
            if book.knows(meta.version, meta.path):
                return book.version
            if meta.version <= book.head:
                raise StaleVersion(
                    f"version {meta.version} is not newer than {book.head}, which was published"
                )
            record = WeightRecord(version=meta.version, path=meta.path, digest=meta.digest)
            if book.pinned is None:
                await self._transact(Change(record, None, policy, is_group(meta.path)))
            elif is_group(meta.path):
                raise Conflict(
                    f"version {book.pinned} is pinned and nobody would hold version {meta.version}, "
                    "which flows through a process group; release the pin, then publish again"
                )
            else:
                await book.keep(record)
            return book.version

    async def rollback(self, version: PolicyVersion) -> None:
        """Serve a kept version until the next one is published."""
        async with self._alone():
            if self._book.pinned is not None:
                raise Conflict(
                    f"version {self._book.pinned} is pinned; release it, or pin {version}"
                )
            await self._go_to(version, pinned=None)

    async def pin(self, version: PolicyVersion | None) -> None:
        """Serve a kept version and hold it; None goes on with the newest."""
        async with self._alone():
            if version is not None:
                await self._go_to(version, pinned=version)
            elif self._book.pinned is not None:
                await self._go_to(self._book.head, pinned=None)

    def has(self, version: PolicyVersion) -> bool:
        """See `Generator.has`."""
        return version in (self._book.version, self._reservation.version)

    async def reserve(self, wanted: WeightReservation) -> ReservationStatus:
        """Let some servers stay at a version while others are published; to be repeated.

        Raises:
            NotFound: it is not kept.
            Conflict: another name has a reservation.
        """
        self._reservation.check(wanted)
        if self._reservation.is_settled(wanted):
            await self._reservation.repeat()
        else:
            async with self._alone():
                await self._reservation.take(wanted)
        self._seat()
        return self._reservation.status()

    async def end_reservation(self, name: str) -> None:
        """Let its servers go on with the newest version."""
        if await self._reservation.end(name):
            self._seat()

    def _seat(self) -> None:
        for member in self._members.present():
            self.review(member)

    async def retract(self, version: PolicyVersion) -> None:
        """See `Generator.cancel_update`."""
        async with self._alone():
            if await self._book.retract(version):
                log.warning("version retracted", extra={"version": version})

    def review(self, member: Member) -> None:
        """It reported; see `CatchUp.review`."""
        self._catch_up.review(member, self._is_committing or self._turn.is_elsewhere)

    async def follow(self) -> None:
        """Learn what other gateways have published.

        Who was not to swap to it takes no traffic from here on; the others are judged when the turn of
        that gateway is over.
        """
        if not self._book.notes.is_shared:
            return
        await self._turn.look()
        before, seats = self._book.committed, self._book.seats
        await self._book.refresh()
        if self._book.seats != seats:
            self._seat()
        if self._book.committed == before or self._publishing is not None:
            return
        for member in self._members.ready():
            if not self._book.was_swapped(member.name) and not self._catch_up.is_current(member):
                self._members.fence(
                    member, f"another gateway has committed version {self._book.version}"
                )

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Nobody else changes what serves; the book shows what others did before."""
        async with self._turn.held():
            await self._book.refresh()
            self._seat()
            yield

    async def _go_to(self, version: PolicyVersion, pinned: PolicyVersion | None) -> None:
        record = self._book.find(version)
        if record == self._book.committed:
            await self._book.hold(pinned)
        else:
            await self._transact(Change(record, pinned))

    async def _transact(self, change: Change) -> None:
        self._publishing = change.record.version
        try:
            with self._metrics.counted():
                with self._metrics.staging_s.time():
                    staged = await self._staging.stage(change)
                with self._metrics.commit_s.time():
                    await _to_the_end(self._commit(staged))
        finally:
            self._staging.release()
            self._publishing = None

    async def _commit(self, staged: Staged) -> None:
        """From the commit point on: whatever fails now is caught up later."""
        record = staged.change.record
        self._is_committing = True
        try:
            names = [member.name for member in staged.members]
            await self._book.commit(record, staged.change.pinned, names)
            for member in self._members.ready():
                if member not in staged.members:
                    why = staged.refusals.get(member, "it was not asked")
                    self._members.fence(
                        member, f"it has not staged version {record.version}: {why}"
                    )
            if self._is_rolling:
                running = [await self._swap(member, staged) for member in staged.members]
            else:
                swaps = (self._swap(member, staged) for member in staged.members)
                running = await asyncio.gather(*swaps)
        finally:
            self._is_committing = False
        self.updates_in_flight += sum(running) > 0
        log.info(
            "version committed",
            extra={"version": record.version, "epoch": staged.epoch, "servers": len(running)},
        )

    async def _swap(self, member: Member, staged: Staged) -> int:
        """Sequences that were running there at that moment."""
        change = staged.change
        try:
            running = await self._orders.commit(member, change.record, staged.epoch, change.policy)
        except ServiceError as error:
            self._members.fence(member, f"commit of version {change.record.version}: {error}")
            return 0
        self._members.set_ready(member)
        return running


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Await work that is not undone: to cancel it comes too late."""
    task = asyncio.create_task(work)
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if this is not None:
                this.uncancel()
    return task.result()
