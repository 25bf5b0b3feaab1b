"""Servers that stay at a version while others are published: for evaluations of that version.

They take requests for exactly this version, and no part in publications; a version that is past is
brought to them as to a late joiner (`catch_up`). At least one server is left to the rest of the
traffic. Who they are stands in the publication state, so that all gateways agree and one that is started
again goes on.

A reservation is asked for again and again; one that was not for `LEASE_S` is over. Each repeat looks
whether servers were lost, or came.
"""

from __future__ import annotations

import logging

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.versions.publication_state import PublicationState
from headway.contracts.errors import Conflict, ServiceError
from headway.contracts.http.weights import (
    ReservationStatus,
    WeightRecord,
    WeightReservation,
)
from headway.contracts.types import PolicyVersion
from headway.runtime.clock import monotonic

log = logging.getLogger(__name__)

LEASE_S = 60.0


class Reservation:
    """The one that there may be; used on one event loop."""

    def __init__(self, members: Members, state: PublicationState) -> None:
        self._members = members
        self._state = state
        self._failure: tuple[PolicyVersion, str] | None = None

    @property
    def _held(self) -> WeightReservation | None:
        is_over = monotonic() - self._state.repeated_at > LEASE_S
        return None if is_over else self._state.reserved

    @property
    def version(self) -> PolicyVersion | None:
        """Version that is reserved."""
        return None if self._held is None else self._held.version

    @property
    def record(self) -> WeightRecord | None:
        """Record of the reserved version; None for the model that servers start with."""
        records = (one for one in self._state.kept if one.version == self.version)
        return next(records, None)

    def holds(self, member: Member) -> bool:
        """True if a server is to stay at it."""
        return self._held is not None and member.name in self._state.reserved_servers

    def suits(self, member: Member) -> bool:
        """True if a server that takes requests takes those that it should."""
        return not member.is_serving or (member.state == "reserved") == self.holds(member)

    def check(self, wanted: WeightReservation) -> None:
        """Refuse what cannot be held.

        Raises:
            NotFound: the version is not kept.
            Conflict: another name has a reservation.
        """
        held = self._held
        if held is not None and held.name != wanted.name:
            raise Conflict(f"{held.name!r} has reserved version {held.version}; try again later")
        if wanted.version != self._state.version and not self._members.at(wanted.version):
            self._state.find(wanted.version)

    def is_settled(self, wanted: WeightReservation) -> bool:
        """True if as many servers stay as may."""
        return self._held == wanted and set(self._state.reserved_servers) == set(
            self._choose(wanted)
        )

    async def repeat(self) -> None:
        """It is still wanted."""
        await self._state.reserve(self._state.reserved, self._state.reserved_servers)

    async def take(self, wanted: WeightReservation) -> None:
        """Choose its servers again.

        Raises:
            NotFound, Conflict: as `check`.
        """
        self.check(wanted)
        servers = self._choose(wanted)
        if set(servers) != set(self._state.reserved_servers):
            log.info("servers reserved", extra={"version": wanted.version, "servers": servers})
            self._failure = None
        await self._state.reserve(wanted, servers)

    async def end(self, name: str) -> bool:
        """End the reservation; return True if there was one of this name."""
        reserved = self._state.reserved
        if reserved is None or reserved.name != name:
            return False
        await self._state.reserve(None)
        return True

    def status(self) -> ReservationStatus:
        """Return the state of the reservation."""
        version, why = self._failure or (None, None)
        return ReservationStatus(
            servers=[one.name for one in self._members.present() if self.holds(one)],
            num_ready=0 if self.version is None else len(self._members.at(self.version)),
            failure=why if version == self.version else None,
        )

    def note_failure(self, member: Member, error: ServiceError) -> None:
        """A server could not be brought to what it is to serve."""
        if self._held is not None and self.holds(member):
            self._failure = (self._held.version, f"{member.name}: {error}")

    def _choose(self, wanted: WeightReservation) -> list[str]:
        """Those that stay already, then who has the version, then who has the least to do."""
        here = [one for one in self._members.present() if one.is_serving or self.holds(one)]
        before = self._state.reserved_servers if self._held == wanted else ()
        lies_somewhere = any(one.version == wanted.version for one in self._state.kept)

        def has_it(member: Member) -> bool:
            return member.report.version == wanted.version

        def order(member: Member) -> tuple[bool, bool, int]:
            return member.name not in before, not has_it(member), member.outstanding

        able = sorted((one for one in here if lies_somewhere or has_it(one)), key=order)
        return [one.name for one in able[: max(0, min(wanted.servers, len(here) - 1))]]
