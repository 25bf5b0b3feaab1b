"""The first half of a publication: a version is staged on the servers, and they agree on what it is.

All of them are waited for, unless too few could be left for the quorum. Over a process group one
failure ends the transfer for all: it begins anew, with another epoch, among the survivors.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import ServiceError, SyncError
from headway.contracts.http.weights import Seat, WeightRecord
from headway.contracts.types import PolicyVersion
from headway.rollout.fleet.members import Member, Members
from headway.rollout.publishing.book import WeightBook
from headway.rollout.publishing.orders import WeightOrders, is_group, seats

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Change:
    """What a transaction is to bring about."""

    record: WeightRecord
    """Its digest, if given, is what servers must stage."""
    pinned: PolicyVersion | None = None
    policy: UpdatePolicy | None = None
    in_group: bool = False
    """The publisher sends it over a process group, now."""


@dataclass(frozen=True, slots=True)
class Staged:
    """Who is to commit what."""

    change: Change
    epoch: int
    members: Sequence[Member]
    refusals: Mapping[Member, ServiceError]
    """Why others are not."""


class Staging:
    """Brings versions to a quorum, or to nobody."""

    def __init__(
        self, config: FleetConfig, members: Members, book: WeightBook, orders: WeightOrders
    ) -> None:
        self._config = config
        self._members = members
        self._book = book
        self._orders = orders
        self._farewells: set[asyncio.Task[None]] = set()

    async def stage(self, change: Change) -> Staged:
        """Stage on every server that is ready now; with none, nobody has to agree.

        What flows through a group lies nowhere afterwards: with none, it waits for one. Until `release`,
        this decides what they serve.

        Raises:
            SyncError: too few could; all have forgotten it.
        """
        await self._members.until_back(self._book.num_expected)
        deadline = time.monotonic() + self._config.update_timeout_s
        members = await self._announce(change, deadline)
        quorum = self._quorum_of(members)
        refusals: dict[Member, ServiceError] = {}
        while True:
            ballot = await self._attempt(change, members, quorum, deadline)
            refusals |= ballot.refusals
            if ballot.is_won:
                record = change.record.model_copy(update={"digest": ballot.digest})
                return Staged(
                    replace(change, record=record), ballot.epoch, ballot.agreeing, refusals
                )
            is_nobody_here = all(member.is_leaving for member in members)
            is_stored = not is_group(change.record.path)
            if is_nobody_here and is_stored and self._members.is_open:
                return Staged(change, ballot.epoch, (), refusals)
            if time.monotonic() > deadline or not change.in_group:
                raise self._failure(ballot, refusals)
            if is_nobody_here:
                members = await self._announce(change, deadline)
                quorum = self._quorum_of(members)
                continue
            # A group ends for all when one leaves it: those who only say so are asked again.
            leaving = [member for member in members if member.is_leaving]
            out = leaving or ballot.refusals
            members = [member for member in members if member not in out]
            if len(members) < quorum or not ballot.refusals:
                raise self._failure(ballot, refusals)
            for member in members:
                refusals.pop(member, None)

    def release(self) -> None:
        """The transaction is over."""
        for member in self._members.present():
            member.is_publishing = False

    def _quorum_of(self, members: Sequence[Member]) -> int:
        return max(1, math.ceil(self._config.quorum * len(members) - ROUNDING))

    async def _announce(self, change: Change, deadline: float) -> list[Member]:
        """Who takes part.

        In a group, if none is ready, that is who waits for a version that nobody holds any more.
        """
        if change.in_group:
            await self._members.until_present(1, deadline)
        members = self._members.ready()
        if change.in_group and not members:
            members = self._members.present()
        for member in members:
            member.is_publishing = True
            if member.catching_up is not None:
                member.catching_up.cancel()
        return members

    async def _attempt(
        self, change: Change, members: Sequence[Member], quorum: int, deadline: float
    ) -> _Ballot:
        """One epoch; who is not to commit has been told to forget it."""
        epoch = await self._book.next_epoch(len(members))
        ballot = _Ballot(change, epoch, members, quorum)
        places = seats(members) if change.in_group else [None] * len(members)
        keep: Sequence[Member] = ()
        try:
            await self._ask(ballot, zip(members, places, strict=True), deadline)
            keep = ballot.agreeing if ballot.is_won else ()
        finally:
            others = [member for member in members if member not in keep]
            farewell = self._orders.abort(others, change.record.version, ballot.epoch)
            if keep:
                self._say(farewell)  # who was too slow to stage it may be too slow to answer
            else:
                await farewell
        return ballot

    def _say(self, farewell: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(farewell, name="abort a straggler's staging")
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _ask(
        self, ballot: _Ballot, places: Iterable[tuple[Member, Seat | None]], deadline: float
    ) -> None:
        left_s = deadline - time.monotonic()

        async def ask(member: Member, seat: Seat | None) -> None:
            record = ballot.change.record
            try:
                ballot.digests[member] = await self._orders.prepare(
                    member, record, ballot.epoch, seat, left_s
                )
            except ServiceError as error:
                ballot.refusals[member] = error

        asked = [asyncio.create_task(ask(*place)) for place in places]
        try:
            await self._until_decided(ballot, asked)
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _until_decided(self, ballot: _Ballot, asked: Iterable[asyncio.Task[None]]) -> None:
        """All have answered, or it is lost, or it was won long enough ago for who is slow."""
        pending, left_s = set(asked), None
        while pending and not ballot.is_lost:
            if ballot.is_won and not ballot.change.in_group and left_s is None:
                left_s, won = self._config.straggler_s, time.monotonic()
            done, pending = await asyncio.wait(
                pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if left_s is not None:
                left_s = max(0.0, won + self._config.straggler_s - time.monotonic())
                if not done:
                    return

    def _failure(self, ballot: _Ballot, refusals: Mapping[Member, ServiceError]) -> SyncError:
        version = ballot.change.record.version
        reasons = "".join(f"; {member.name}: {error}" for member, error in refusals.items())
        return SyncError(
            f"version {version} was not committed, {self._book.version} goes on serving: "
            f"{ballot.describe()}{reasons}"
        )


class _Ballot:
    """What the servers said in one epoch."""

    def __init__(self, change: Change, epoch: int, members: Sequence[Member], quorum: int) -> None:
        self.change = change
        self.epoch = epoch
        self.digests: dict[Member, str] = {}
        self.refusals: dict[Member, ServiceError] = {}
        self._members = members
        self._quorum = quorum

    @property
    def is_lost(self) -> bool:
        """Whatever the others say, it is not won."""
        if self.change.in_group:
            return bool(self.refusals)
        return len(self._members) - len(self.refusals) < self._quorum

    @property
    def is_won(self) -> bool:
        """Enough staged the same."""
        return not self.is_lost and len(self.agreeing) >= self._quorum

    @property
    def digest(self) -> str | None:
        """Of what most have staged, empty if nobody can know it; None if as many have another."""
        votes = Counter(digest for digest in self.digests.values() if digest).most_common(2)
        if len(votes) == 2 and votes[0][1] == votes[1][1]:
            return None
        return votes[0][0] if votes else ""

    @property
    def agreeing(self) -> list[Member]:
        """Who has staged that; a server that cannot know agrees."""
        elected = self.digest
        if elected is None:
            return []
        return [member for member, digest in self.digests.items() if digest in ("", elected)]

    def describe(self) -> str:
        """How it ended."""
        num_forms = len({digest for digest in self.digests.values() if digest})
        forms = f" in {num_forms} different forms" if num_forms > 1 else ""
        return (
            f"{len(self.digests)} of {len(self._members)} ready servers staged it{forms}, "
            f"{self._quorum} that agree are needed"
        )
