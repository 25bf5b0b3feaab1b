"""Publications: a version is staged on every server, recorded, and then swapped in on all of them.

    announce ─► prepare ─► digests agree, quorum ─► RECORD ─► commit ─► ack
                   └─────► abort: the old version goes on serving

- One transaction at a time (`_update`), over all gateways that share a ledger; each has an epoch, durable
  before the first server hears of it. Servers obey the highest epoch, so what is left of an
  interrupted transaction cannot commit.
- `RECORD` (`PublicationState.commit`) is the commit point. Killed before it, the gateway comes back with
  the old version, and the publisher's repeat finds what servers have staged. Killed after it, it comes
  back with the new one, and who had not committed is caught up.
- It concerns the servers that are `ready` when it begins; all others catch up (`catch_up`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.publishing.catch_up import CatchUp
from gateway.publishing.fleet_adapters import FleetAdapters
from gateway.publishing.metrics import PublicationMetrics
from gateway.publishing.orders import WeightOrders
from gateway.publishing.reservation import Reservation
from gateway.publishing.staging import QuorumStaging, StagedChange, VersionChange
from gateway.versions.adapter_state import AdapterState
from gateway.versions.publication_state import PublicationState
from gateway.versions.shared_lock import ADAPTERS, SharedLock
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import Conflict, ServiceError, StaleVersion
from headway.contracts.http.weights import (
    ReservationStatus,
    WeightRecord,
    WeightReservation,
    WeightStatus,
    is_group,
    is_stored,
)
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from headway.runtime.tasks import run_uncancelled

log = logging.getLogger(__name__)


class Publications:
    """The one place that changes the version of a fleet; used on one event loop."""

    def __init__(
        self,
        config: FleetConfig,
        members: Members,
        state: PublicationState,
        metrics: CollectorRegistry,
        place: str = "",
    ) -> None:
        self._lock = SharedLock(state.notes, config.lease_s, place)
        self._adapter_lock = SharedLock(state.notes, config.lease_s, place, ADAPTERS)
        self.adapters = FleetAdapters(
            config, members, AdapterState(state.notes), self._adapter_lock
        )
        """Adapters that all servers hold."""
        self.updates_in_flight = 0
        self._is_rolling = config.commit_order == "rolling"
        self._members = members
        self._state = state
        self._orders = WeightOrders(config, members)
        self._staging = QuorumStaging(config, members, state, self._orders)
        self._reservation = Reservation(members, state)
        self._catch_up = CatchUp(members, state, self._orders, self._reservation, self.adapters)
        self._publishing: PolicyVersion | None = None
        self._before: PolicyVersion | None = None
        """While servers swap, the version that they swap from."""
        self._metrics = PublicationMetrics(metrics, self.status)

    async def start(self) -> None:
        """End what a former process was at.

        Raises:
            StateError: the ledger cannot be reached.
        """
        await self._lock.inherit()
        await self._adapter_lock.inherit()
        await self.adapters.refresh()

    def status(self) -> WeightStatus:
        """A picture of the publication state now."""
        state = self._state
        return WeightStatus(
            committed=state.committed,
            head=state.head,
            epoch=state.epoch,
            pinned=state.pinned,
            reserved=self._reservation.version,
            publishing=self._publishing,
            kept=list(state.kept),
        )

    @property
    def version(self) -> PolicyVersion:
        """The committed version of the fleet."""
        return self._state.version

    @property
    def sampled_version(self) -> PolicyVersion:
        """See `Generator`; another gateway's publication counts from its commit."""
        version = self._state.version
        return version if self._before is None else min(version, self._before)

    async def update_weights(
        self, meta: WeightUpdateMeta, policy: UpdatePolicy | None = None
    ) -> PolicyVersion:
        """See `WeightUpdater.update_weights`."""
        async with self._alone():
            state = self._state
            if state.knows(meta.version, meta.path):
                return state.version
            if meta.version <= state.head:
                raise StaleVersion(
                    f"version {meta.version} is not newer than {state.head}, which was published"
                )
            record = WeightRecord(
                version=meta.version, path=meta.path, digest=meta.digest, label=meta.label
            )
            if state.pinned is None:
                await self._transact(VersionChange(record, None, policy, is_group(meta.path)))
            elif not is_stored(meta.path):
                raise Conflict(
                    f"version {state.pinned} is pinned and nobody would hold version {meta.version}, "
                    "which is stored nowhere; release the pin, then publish again"
                )
            else:
                await state.keep(record)
            return state.version

    async def rollback(self, version: PolicyVersion) -> WeightStatus:
        """Serve a kept version until the next one is published.

        Raises:
            NotFound: it is not kept.
            SyncError: it cannot be staged any more; what serves goes on.
        """
        async with self._alone():
            if self._state.pinned is not None:
                raise Conflict(
                    f"version {self._state.pinned} is pinned; release it, or pin {version}"
                )
            await self._go_to(version, pinned=None)
        return self.status()

    async def pin(self, version: PolicyVersion | None) -> WeightStatus:
        """Serve a kept version and hold it while others are published; None goes on with the newest.

        Raises:
            NotFound, SyncError: as `rollback`.
        """
        async with self._alone():
            if version is not None:
                await self._go_to(version, pinned=version)
            elif self._state.pinned is not None:
                await self._go_to(self._state.head, pinned=None)
        return self.status()

    def label(self, version: PolicyVersion) -> str | None:
        """Return the text by which a version's publisher names it, if it has one and is remembered."""
        return next((kept.label for kept in self._state.kept if kept.version == version), None)

    @property
    def newest_path(self) -> str | None:
        """Path of the version with the highest number that is kept."""
        kept = self._state.kept
        return max(kept, key=lambda one: one.version).path if kept else None

    def has(self, version: PolicyVersion) -> bool:
        """See `Generator.has`."""
        return version in (self._state.version, self._reservation.version)

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
        self._review_all()
        return self._reservation.status()

    async def end_reservation(self, name: str) -> None:
        """Let its servers go on with the newest version."""
        if await self._reservation.end(name):
            self._review_all()

    def _review_all(self) -> None:
        for member in self._members.present():
            self.review(member)

    async def cancel_update(self, version: PolicyVersion) -> None:
        """See `WeightUpdater.cancel_update`."""
        async with self._alone():
            if await self._state.retract(version):
                log.warning("version retracted", extra={"version": version})

    def review(self, member: Member) -> None:
        """It reported; see `CatchUp.review`."""
        self._catch_up.review(member, self._before is not None or self._lock.is_elsewhere)

    async def follow(self) -> None:
        """Learn what other gateways have published.

        A server that was not to swap to it takes no traffic from here on; the others are checked
        when that gateway has released the lock.
        """
        await self._lock.look()
        await self.adapters.refresh()
        before, reserved = self._state.committed, self._state.reserved_servers
        await self._state.refresh()
        if self._state.reserved_servers != reserved:
            self._review_all()
        if self._state.committed == before or self._publishing is not None:
            return
        for member in self._members.ready():
            if not self._state.was_swapped(member.name) and not self._catch_up.is_current(member):
                self._members.fence(
                    member, f"another gateway has committed version {self._state.version}"
                )

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Nobody else changes what serves; the publication state shows what others did before."""
        async with self._lock.held():
            await self._state.refresh()
            self._review_all()
            yield

    async def _go_to(self, version: PolicyVersion, pinned: PolicyVersion | None) -> None:
        record = self._state.find(version)
        if record == self._state.committed:
            await self._state.hold(pinned)
        else:
            await self._transact(VersionChange(record, pinned))

    async def _transact(self, change: VersionChange) -> None:
        self._publishing = change.record.version
        try:
            with self._metrics.counted():
                with self._metrics.staging_s.time():
                    staged = await self._staging.stage(change)
                with self._metrics.commit_s.time():
                    await run_uncancelled(self._commit(staged))
        finally:
            self._staging.release()
            self._publishing = None

    async def _commit(self, staged: StagedChange) -> None:
        """Run the part behind the commit point: whatever fails now is caught up later."""
        record = staged.change.record
        self._before = self._state.version
        try:
            names = [member.name for member in staged.members]
            await self._state.commit(record, staged.change.pinned, names)
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
            self._before = None
            self._state.changed.notify()  # more may start
        self.updates_in_flight += sum(running) > 0
        log.info(
            "version committed",
            extra={"version": record.version, "epoch": staged.epoch, "servers": len(running)},
        )

    async def _swap(self, member: Member, staged: StagedChange) -> int:
        """Sequences that were running there at that moment."""
        change = staged.change
        try:
            running = await self._orders.commit(member, change.record, staged.epoch, change.policy)
        except ServiceError as error:
            self._members.fence(member, f"commit of version {change.record.version}: {error}")
            return 0
        self._members.set_ready(member)
        return running
