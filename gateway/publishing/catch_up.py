"""Bring servers to the committed version beside publications: those that join, failed, or diverged.

It holds no lock and keeps no publication waiting: it stages what is committed now, and only if that is
still committed after its swap, it takes traffic. Else it goes on to what came meanwhile; at once, since
no server may be left that holds the former version. A server that is reserved for a version is
brought to that one in the same way.
"""

from __future__ import annotations

import asyncio
import logging

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.publishing.fleet_adapters import FleetAdapters
from gateway.publishing.orders import WeightOrders
from gateway.publishing.reservation import Reservation
from gateway.versions.publication_state import PublicationState
from headway.contracts.errors import Fenced, ServiceError
from headway.contracts.http.weights import WeightRecord

log = logging.getLogger(__name__)

MAX_DEVIATIONS = 1
"""A server sends its reports one after the other, so of those that come after a commit only the first can
be from before it; where gateways pass them on, one more may be on its way. Where versions come faster
than reports, each may be from before the newest one: so they are counted again for every version."""


class CatchUp:
    """Compares what servers report with what is committed; tries again at each report."""

    def __init__(
        self,
        members: Members,
        state: PublicationState,
        orders: WeightOrders,
        reservation: Reservation,
        adapters: FleetAdapters,
    ) -> None:
        self._members = members
        self._state = state
        self._orders = orders
        self._reservation = reservation
        self._adapters = adapters

    def review(self, member: Member, is_committing: bool) -> None:
        """It reported: see whether it has what is committed, and bring it there if not.

        One that reports to another gateway is brought there by that one.

        Args:
            member: its report is new.
            is_committing: servers are changing their version right now, by whichever gateway.
        """
        if member.mismatch:
            self._members.fence(member, member.mismatch)
            return
        if not member.is_publishing and not self._reservation.suits(member):
            self._members.set_joining(member)
        if member.is_serving and not is_committing and not self._adapters.is_changing:
            self._watch(member)
        if member.is_publishing:
            return
        if member.catching_up is not None and member.is_catching_up:
            if not _is_same(member.aims_at, self._target(member)):
                member.catching_up.cancel()  # the next report starts over
            return
        if member.state in ("joining", "fenced"):
            if self.is_current(member):
                self._members.set_ready(member, self._reservation.holds(member))
            elif self._target(member) is None and not self._has_version(member):
                self._members.fence(
                    member,
                    f"it has version {member.report.version}, but nothing was published through "
                    "this gateway",
                )
            elif member.is_own:
                member.catching_up = asyncio.create_task(self._bring(member), name="catch up")

    def _watch(self, member: Member) -> None:
        if self.is_current(member):
            member.num_deviations = 0
            return
        target = self._target(member)
        if member.deviates_from != target:
            member.deviates_from, member.num_deviations = target, 0
        member.num_deviations += 1
        if member.num_deviations > MAX_DEVIATIONS + self._state.notes.is_shared:
            self._members.fence(
                member,
                f"it reports version {member.report.version} {member.report.digest} and adapters "
                f"{member.adapters}, wanted is {target} and {dict(self._adapters.versions)}",
            )

    def _target(self, member: Member) -> WeightRecord | None:
        """Return the version that a server is to serve; None is the model that servers start
        with."""
        if self._reservation.holds(member):
            return self._reservation.record
        return self._state.committed

    def is_current(self, member: Member) -> bool:
        """True if its last report names what it is to serve."""
        return self._has_version(member) and self._adapters.is_current(member)

    def _has_version(self, member: Member) -> bool:
        record, report = self._target(member), member.report
        if record is None:
            return report.version == 0
        is_known = bool(report.digest and record.digest)
        return report.version == record.version and (not is_known or report.digest == record.digest)

    async def _bring(self, member: Member) -> None:
        epoch = self._state.epoch
        try:
            while not await self._bring_once(member):
                epoch = self._state.epoch
        except ServiceError as error:
            self._members.fence(member, f"catching up: {error}")
            if isinstance(error, Fenced):
                await self._answer_fence(member, epoch)
            else:
                self._reservation.note_failure(member, error)

    async def _answer_fence(self, member: Member, epoch: int) -> None:
        """A server has heard of a newer epoch than this one."""
        await self._state.refresh()
        if self._state.epoch > epoch:
            return  # it comes from a gateway with the same ledger; the next report tries again
        log.error("server obeys another gateway, too", extra={"server": member.name})
        await self._state.next_epoch()  # it reports here: this is the one to obey

    async def _bring_once(self, member: Member) -> bool:
        """Bring it a step further; return True if nothing is left to do."""
        record, epoch = self._target(member), self._state.epoch
        if member.is_leaving:
            return True
        member.aims_at = record
        await self._adapters.bring(member)
        if record is None:
            self._members.set_ready(member)
            return True
        digest = await self._orders.prepare(member, record, epoch)
        if record.digest is None:
            await self._state.prove(record, digest)
            record = record.model_copy(update={"digest": digest})
        if record == self._target(member):
            await self._orders.commit(member, record, epoch)
        if record != self._target(member):
            return False
        self._members.set_ready(member, self._reservation.holds(member))
        return True


def _is_same(one: WeightRecord | None, other: WeightRecord | None) -> bool:
    """True if they are one publication; a digest may have become known meanwhile."""
    if one is None or other is None:
        return one is other
    return (one.version, one.path) == (other.version, other.path)
