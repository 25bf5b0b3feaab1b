"""A ledger that tells witnesses what it was told: how attempts ended, what was given out.

It is told of everything exactly once, whoever plays and whoever asks; what another gateway reports to
the same store is that gateway's to witness.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from headway.contracts.errors import Fenced
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryGroup
from headway.rollout.ledger.base import Admission, Delivery, Lease, Ledger

Outcome = Literal["ready", "filtered", "failed", "requeued"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One play of a rollout, from its lease to its end."""

    request: RolloutRequest
    outcome: Outcome
    seconds: float
    group: TrajectoryGroup | None = None
    """The result, if it was kept."""


class Witness(Protocol):
    """Hears what happened; must neither wait nor fail."""

    def ended(self, attempt: Attempt) -> None:
        """An attempt of this gateway ended."""

    def delivered(self, staleness: int, num_trajectories: int) -> None:
        """A group was given out, so many versions after its oldest token was sampled."""

    def expired(self, num_groups: int) -> None:
        """Leases of silent owners, or times of rollouts, ran out."""


def watched(ledger: Ledger, witnesses: Sequence[Witness]) -> Ledger:
    """The same ledger, with witnesses."""
    return cast(Ledger, _WatchedLedger(ledger, witnesses))


class _WatchedLedger:
    def __init__(self, ledger: Ledger, witnesses: Sequence[Witness]) -> None:
        self._ledger = ledger
        self._witnesses = witnesses
        self._began: dict[str, float] = {}
        """By lease."""

    def __getattr__(self, name: str) -> Any:
        """All else is the ledger's own."""
        return getattr(self._ledger, name)

    async def lease(self, admission: Admission) -> list[Lease]:
        leases = await self._ledger.lease(admission)
        now = time.monotonic()
        self._began.update((lease.key, now) for lease in leases)
        return leases

    async def complete(self, lease: Lease, group: TrajectoryGroup) -> None:
        await self._end(lease, "ready", self._ledger.complete(lease, group), group)

    async def drop_filtered(self, lease: Lease, reason: str, mean_reward: float) -> None:
        await self._end(lease, "filtered", self._ledger.drop_filtered(lease, reason, mean_reward))

    async def fail(self, lease: Lease, reason: str) -> None:
        await self._end(lease, "failed", self._ledger.fail(lease, reason))

    async def requeue(self, lease: Lease, reason: str) -> None:
        await self._end(lease, "requeued", self._ledger.requeue(lease, reason))

    async def _end(
        self,
        lease: Lease,
        outcome: Outcome,
        report: Awaitable[None],
        group: TrajectoryGroup | None = None,
    ) -> None:
        try:
            await report
        except Fenced:
            self._began.pop(lease.key, None)
            raise
        began = self._began.pop(lease.key, None)
        if began is None:
            return  # reported before, and the answer was lost
        attempt = Attempt(lease.request, outcome, time.monotonic() - began, group)
        for witness in self._witnesses:
            witness.ended(attempt)

    async def expire(self) -> int:
        num_groups = await self._ledger.expire()
        if num_groups:
            for witness in self._witnesses:
                witness.expired(num_groups)
        return num_groups

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        found = await self._ledger.deliver(delivery_id, count, consumer, version, max_staleness)
        self._give_out(found)
        return found

    async def deliver_exactly(
        self, delivery_id: str, rollout_ids: Sequence[str], version: PolicyVersion
    ) -> Delivery:
        found = await self._ledger.deliver_exactly(delivery_id, rollout_ids, version)
        self._give_out(found)
        return found

    def _give_out(self, found: Delivery) -> None:
        for staleness, num_trajectories in found.given:
            for witness in self._witnesses:
                witness.delivered(max(0, staleness), num_trajectories)
