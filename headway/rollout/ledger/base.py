"""What a trajectory ledger promises, and the states of a rollout.

    submit ─► queued ─lease─► leased ─complete─► ready ─deliver─► delivered ─consume─► consumed(step)
                 ▲              │ │                │ ▲                │  ▲                │
                 └──requeue─────┘ └─fail─► failed  │ └───give_back────┘  │                │
                                                   └─► stale             └───(step > checkpoint)

Invariants: a rollout id is submitted once; it is in one state; every transition is one transaction
that also appends to the event log; it ends consumed exactly once, or failed or stale with a reason.
Sizes are trajectories, so a group of 8 counts 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.contracts.http import LedgerAudit, LedgerCounts
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Lease:
    """One rollout to play."""

    request: RolloutRequest
    attempt: int
    """1 for the first."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a `deliver` call found."""

    payloads: tuple[bytes, ...] | None
    """One codec payload per group, in submission order; None when fewer than asked are ready."""
    num_ready: int
    """Groups that are ready."""
    dropped: int
    """Trajectories that this call dropped as too stale."""


class Ledger(Protocol):
    """Durable record of every rollout; one writer process."""

    async def open(self) -> None:
        """Open the store; rollouts that a former process had leased go back to the queue."""

    async def submit(self, requests: Sequence[RolloutRequest], max_queued: int) -> list[bool]:
        """Queue rollouts; per request whether it was new.

        Raises:
            Conflict: a known id with other content; nothing of this call is stored.
            QueueFull: more than `max_queued` trajectories would wait.
        """

    async def lease(self, max_size: int, version: PolicyVersion) -> Lease | None:
        """Take the oldest queued rollout, if its group fits into `max_size` trajectories."""

    async def complete(self, group: TrajectoryGroup) -> None:
        """Store the result of a leased rollout."""

    async def fail(self, rollout_id: str, reason: str) -> None:
        """Record that a leased rollout ends without a result."""

    async def requeue(self, rollout_id: str, reason: str) -> None:
        """Put a leased rollout back; it keeps its place in the order."""

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        rollout_ids: Sequence[str] | None,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        """Give out `count` ready groups, oldest first, or none.

        Raises:
            WorkflowError: one of `rollout_ids` failed or was dropped.
            NotFound: one of `rollout_ids` was never submitted.
        """

    async def consume(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        """Record consumption by a step; idempotent.

        Raises:
            Conflict: one was consumed by another step, or was not delivered.
        """

    async def give_back(self, step: int) -> int:
        """Make ready again what was delivered or consumed after `step`; returns the groups."""

    async def counts(self) -> LedgerCounts:
        """Trajectories by state."""

    async def audit(self) -> LedgerAudit:
        """Recompute every state from the event log and compare."""

    async def get_note(self, key: str) -> str | None:
        """A small durable value that belongs to the run."""

    async def put_note(self, key: str, value: str) -> None:
        """Store a small durable value."""

    async def close(self) -> None:
        """Flush and close."""
