"""The first half of a publication: a version is staged on the servers, and they agree on what it is.

All of them are waited for, unless too few could be left for the quorum. Over a process group one
failure ends the transfer for all: it starts over, with another epoch, among the survivors.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.fleet.member import Member
from gateway.fleet.members import Members
from gateway.publishing.orders import WeightOrders, group_ranks
from gateway.versions.publication_state import PublicationState
from headway.contracts.config.gateway import FleetConfig
from headway.contracts.config.server import UpdatePolicy
from headway.contracts.errors import ServiceError, SyncError
from headway.contracts.http.weights import GroupRankBody, WeightRecord, is_group
from headway.contracts.types import PolicyVersion
from headway.runtime.clock import monotonic
from headway.runtime.tasks import cancel_and_wait

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class VersionChange:
    """Change that a transaction is to bring about."""

    record: WeightRecord
    """Record of the version; servers must stage its digest, if given."""
    pinned: PolicyVersion | None = None
    policy: UpdatePolicy | None = None
    in_group: bool = False
    """The publisher sends it over a process group, now."""


@dataclass(frozen=True, slots=True)
class StagedChange:
    """Staged version, and the servers that are to commit it."""

    change: VersionChange
    epoch: int
    members: Sequence[Member]
    refusals: Mapping[Member, ServiceError]
    """Why others are not."""


class QuorumStaging:
    """Stages versions on a quorum of servers, or on none."""

    def __init__(
        self, config: FleetConfig, members: Members, state: PublicationState, orders: WeightOrders
    ) -> None:
        self._config = config
        self._members = members
        self._state = state
        self._orders = orders
        self._farewells: set[asyncio.Task[None]] = set()

    async def stage(self, change: VersionChange) -> StagedChange:
        """Stage on every server that is ready now; with none, no votes are needed.

        What flows through a group is stored nowhere afterwards: with none, it waits for one. Until
        `release`, this decides what they serve.

        Raises:
            SyncError: too few could; all have forgotten it.
        """
        await self._members.until_back(self._state.num_expected)
        deadline = monotonic() + self._config.update_timeout_s
        announced = members = await self._announce(change, deadline)
        quorum = self._quorum_of(members)
        refusals: dict[Member, ServiceError] = {}
        while True:
            votes = await self._attempt(change, members, quorum, deadline)
            refusals |= votes.refusals
            if votes.is_won:
                record = change.record.model_copy(update={"digest": votes.digest})
                return StagedChange(
                    replace(change, record=record), votes.epoch, votes.agreeing, refusals
                )
            is_nobody_here = all(member.is_leaving for member in members)
            is_stored = not is_group(change.record.path)
            if is_nobody_here and is_stored and self._members.is_open:
                return StagedChange(change, votes.epoch, (), refusals)
            if monotonic() > deadline or not change.in_group:
                raise self._failure(votes, refusals)
            if is_nobody_here:
                announced = members = await self._announce(change, deadline)
                quorum = self._quorum_of(members)
                continue
            # A group ends for all when one leaves it: those who only say so are asked again, also if they
            # were heard before the one that left.
            staying = [member for member in announced if not member.is_leaving]
            if len(staying) < len(announced):
                announced = members = staying
            else:
                members = [member for member in members if member not in votes.refusals]
            if len(members) < quorum or not votes.refusals:
                raise self._failure(votes, refusals)
            for member in members:
                refusals.pop(member, None)

    def release(self) -> None:
        """The transaction is over."""
        for member in self._members.present():
            member.is_publishing = False

    def _quorum_of(self, members: Sequence[Member]) -> int:
        return max(1, math.ceil(self._config.quorum * len(members) - ROUNDING))

    async def _announce(self, change: VersionChange, deadline: float) -> list[Member]:
        """Return the servers that take part.

        With none ready, those of a group are the ones that wait for a version that no server holds any
        more.
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
        self, change: VersionChange, members: Sequence[Member], quorum: int, deadline: float
    ) -> _Votes:
        """Run one epoch; servers that are not to commit have been told to drop the version."""
        epoch = await self._state.next_epoch(len(members))
        votes = _Votes(change, epoch, members, quorum)
        places = group_ranks(members) if change.in_group else [None] * len(members)
        keep: Sequence[Member] = ()
        try:
            await self._ask(votes, zip(members, places, strict=True), deadline)
            keep = votes.agreeing if votes.is_won else ()
        finally:
            others = [member for member in members if member not in keep]
            farewell = self._orders.abort(others, change.record.version, votes.epoch)
            if keep:
                self._say(farewell)  # a server too slow to stage it may be too slow to answer
            else:
                await farewell
        return votes

    def _say(self, farewell: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(farewell, name="abort a straggler's staging")
        self._farewells.add(task)
        task.add_done_callback(self._farewells.discard)

    async def _ask(
        self, votes: _Votes, places: Iterable[tuple[Member, GroupRankBody | None]], deadline: float
    ) -> None:
        left_s = deadline - monotonic()

        async def ask(member: Member, group_rank: GroupRankBody | None) -> None:
            record = votes.change.record
            try:
                votes.digests[member] = await self._orders.prepare(
                    member, record, votes.epoch, group_rank, left_s
                )
            except ServiceError as error:
                votes.refusals[member] = error

        asked = [asyncio.create_task(ask(*place)) for place in places]
        try:
            await self._until_decided(votes, asked)
        finally:
            await cancel_and_wait(asked)

    async def _until_decided(self, votes: _Votes, asked: Iterable[asyncio.Task[None]]) -> None:
        """All have answered, or it is lost, or it was won long enough ago for who is slow."""
        pending, left_s = set(asked), None
        while pending and not votes.is_lost:
            if votes.is_won and not votes.change.in_group and left_s is None:
                left_s, won = self._config.straggler_s, monotonic()
            done, pending = await asyncio.wait(
                pending, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            if left_s is not None:
                left_s = max(0.0, won + self._config.straggler_s - monotonic())
                if not done:
                    return

    def _failure(self, votes: _Votes, refusals: Mapping[Member, ServiceError]) -> SyncError:
        version = votes.change.record.version
        reasons = "".join(f"; {member.name}: {error}" for member, error in refusals.items())
        return SyncError(
            f"version {version} was not committed, {self._state.version} goes on serving: "
            f"{votes.describe()}{reasons}"
        )


class _Votes:
    """Votes of the servers in one epoch."""

    def __init__(
        self, change: VersionChange, epoch: int, members: Sequence[Member], quorum: int
    ) -> None:
        self.change = change
        self.epoch = epoch
        self.digests: dict[Member, str] = {}
        self.refusals: dict[Member, ServiceError] = {}
        self._members = members
        self._quorum = quorum

    @property
    def is_lost(self) -> bool:
        """True if it cannot be won any more, whatever the others answer."""
        if self.change.in_group:
            return bool(self.refusals)
        return len(self._members) - len(self.refusals) < self._quorum

    @property
    def is_won(self) -> bool:
        """Enough staged the same."""
        return not self.is_lost and len(self.agreeing) >= self._quorum

    @property
    def digest(self) -> str | None:
        """Digest that most servers have staged, empty if it cannot be known; None if as many have
        another."""
        votes = Counter(digest for digest in self.digests.values() if digest).most_common(2)
        if len(votes) == 2 and votes[0][1] == votes[1][1]:
            return None
        return votes[0][0] if votes else ""

    @property
    def agreeing(self) -> list[Member]:
        """Return the servers that have staged that digest; a server that cannot know agrees."""
        elected = self.digest
        if elected is None:
            return []
        return [member for member, digest in self.digests.items() if digest in ("", elected)]

    def describe(self) -> str:
        """Return how the vote ended, for messages."""
        num_forms = len({digest for digest in self.digests.values() if digest})
        forms = f" in {num_forms} different forms" if num_forms > 1 else ""
        return (
            f"{len(self.digests)} of {len(self._members)} ready servers staged it{forms}, "
            f"{self._quorum} that agree are needed"
        )
