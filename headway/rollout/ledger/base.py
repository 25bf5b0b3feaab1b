"""What a trajectory ledger promises, and the states of a rollout.

    submit ─► queued ─lease─► leased ─complete─► ready ─deliver─► delivered ─consume─► consumed(step)
                 ▲              │ │                │ ▲                │  ▲                │
                 └──requeue─────┘ └─fail─► failed  │ └───give_back────┘  │                │
                                                   └─► stale             └───(step > checkpoint)

    consumed ─replay─► queued (step > checkpoint, and the payload was forgotten with a newer one)
    queued, ready, delivered ─cancel─► cancelled (the consumer detached)

Invariants: a rollout id is submitted once; it is in one state; every transition is one transaction
that also appends to the event log; it ends consumed exactly once, or failed, stale
or cancelled with a reason.
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

    @property
    def key(self) -> str:
        """Names this attempt: a rollout that goes back to the queue may be leased before it is let go."""
        return f"{self.request.rollout_id}#{self.attempt}"


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """How many trajectories may start now."""

    consumer: str | None
    """The attached consumer."""
    bounded: int
    """For the attached consumer's rollouts."""
    free: int
    """For all others."""


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

    async def lease(self, limits: LeaseLimits, version: PolicyVersion) -> Lease | None:
        """Take the oldest queued rollout that may start.

        The attached consumer's queue and everybody else's are two lines: the head of each waits
        until its group fits, and neither blocks the other.
        """

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
        consumer: str,
        rollout_ids: Sequence[str] | None,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        """Give out `count` ready groups of a consumer (or exactly `rollout_ids`), or none.

        Raises:
            WorkflowError: one of `rollout_ids` failed or was dropped.
            NotFound: one of `rollout_ids` was never submitted.
        """

    async def outstanding(self, consumer: str) -> int:
        """Groups of a consumer that are queued, in play or ready: what it may still be given."""

    async def consume(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        """Record consumption by a step; idempotent.

        Raises:
            Conflict: one was consumed by another step, or was not delivered.
        """

    async def give_back(self, consumer: str, step: int) -> int:
        """Make ready again what was delivered or consumed after `step`; returns the groups.

        What `consume` was told is safe in a checkpoint, and then is not, is queued to be played again.
        """

    async def cancel(self, consumer: str) -> int:
        """End what the consumer has not consumed; returns the trajectories."""

    async def counts(self, consumer: str | None = None) -> LedgerCounts:
        """Trajectories by state, of one consumer or of all."""

    async def audit(self) -> LedgerAudit:
        """Recompute every state from the event log and compare."""

    async def get_note(self, key: str) -> str | None:
        """A small durable value that belongs to the run."""

    async def put_note(self, key: str, value: str) -> None:
        """Store a small durable value: once this returns, it survives a power cut."""

    async def close(self) -> None:
        """Flush and close."""
