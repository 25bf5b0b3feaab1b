"""What a trajectory ledger promises, and the states of a rollout.

    submit ─► queued ─lease─► leased ─complete─► ready ─deliver─► delivered ─consume─► consumed(step)
                 ▲              │ │ │              │ ▲                │  ▲                │
                 └──requeue─────┘ │ └─filter─► filtered               │  │                │
                 ▲                └─fail─► failed  │ └───give_back────┘  │                │
                 └────────revive─────────────┘     └─► stale             └───(step > checkpoint)

    consumed ─replay─► queued (step > checkpoint, and the payload was forgotten with a newer one)
    queued, leased, ready, delivered ─cancel─► cancelled (by its submitter, or the consumer detached)

Invariants: a rollout id is submitted once; it is in one state; every transition is one transaction
that also appends to the event log; it ends consumed exactly once, or failed, filtered, stale or
cancelled with a reason. Sizes are trajectories, so a group of 8 counts 8.

Several gateways may share one ledger. A lease belongs to an owner and ends unless it is renewed;
what an attempt reports after its lease went to another is refused (`Fenced`). Admission is decided
within the transaction that leases, from the ledger's own counts, so that the bound holds for all
owners together. Clocks are the store's.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryGroup

OPEN_STATES: tuple[RolloutState, ...] = ("queued", "leased", "ready", "delivered")
"""A rollout in one of these may still be consumed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One rollout to play."""

    request: RolloutRequest
    attempt: int
    """1 for the first, and for the first after the rollout was revived."""
    age_s: float = 0.0
    """Seconds since its submission, or since it was revived."""
    fence: int = 0
    """Grows with every lease of this rollout: a report under one that is not the newest is refused."""

    @property
    def rollout_id(self) -> str:
        """Of the request."""
        return self.request.rollout_id

    @property
    def key(self) -> str:
        """Names this lease: a rollout that goes back to the queue may be leased before it is let go."""
        return f"{self.request.rollout_id}#{self.fence}"


@dataclass(frozen=True, slots=True)
class Admission:
    """How many trajectories may start now, and under which version."""

    version: PolicyVersion
    """Committed; recorded as the version that a lease was admitted at."""
    free: int
    """Trajectories that this owner has room for, whoever consumes them."""
    consumer: str | None = None
    """The attached consumer, whose rollouts are bounded in staleness; the queue of the others is a line
    of its own, and neither blocks the other."""
    budget: int | None = None
    """Trajectories of the attached consumer that may be leased, ready, delivered or consumed, at most:
    what the bound allows at this version. None has no bound."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a `deliver` call found."""

    payloads: tuple[bytes, ...] | None
    """One codec payload per group, in submission order; None when fewer than asked are ready."""
    num_ready: int
    """Groups that are ready."""
    dropped: int
    """Trajectories that this call dropped as too stale."""
    is_held_back: bool = False
    """A group in play can be consumed by this batch only, so the batch waits for it."""
    given: tuple[tuple[int, int], ...] = ()
    """Staleness and trajectories of each group that this call gave out, and no call before it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One rollout as the ledger knows it."""

    request: RolloutRequest
    state: RolloutState
    attempt: int
    submitted_at: float
    """Seconds since the epoch, by the store's clock."""
    changed_at: float
    oldest_version: PolicyVersion | None
    staleness: int | None
    """At delivery, in versions."""
    reason: str | None
    step: int | None
    """Which consumed it."""
    mean_reward: float | None
    payload: bytes | None = None
    """The codec payload, while it is kept and if it was asked for."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event log."""

    event: str
    detail: str | None
    at: float


class Ledger(Protocol):
    """Durable record of every rollout."""

    is_shared: bool
    """Whether other gateways may write to it too: then `revision` tells of their changes."""

    async def connect(self) -> None:
        """Open the store as a visitor who leases nothing: for tools beside a running gateway."""

    async def open(self, owner: str, lease_s: float) -> None:
        """Open the store as one of its owners.

        What a former process had leased is requeued at once, in a store that others write to too if it
        was of the same place (`owner`); the rest is left to `expire`.
        """

    async def revision(self) -> int:
        """A number that grows with every change, whoever made it."""

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        max_queued: int,
        max_queued_each: int | None = None,
    ) -> list[bool]:
        """Queue rollouts; per request whether it was new.

        Args:
            max_queued: trajectories that may wait in all.
            max_queued_each: trajectories that may wait for one consumer.
        Raises:
            Conflict: a known id with other content; nothing of this call is stored.
            QueueFull: more than `max_queued` trajectories would wait; nothing is stored.
        """

    async def lease(self, admission: Admission) -> list[Lease]:
        """Take queued rollouts that may start: highest priority first, then the oldest.

        The head of each line waits until its whole group fits; what waits for a `min_version` above
        `admission.version` is not in line yet.
        """

    async def renew(self, keys: Collection[str]) -> set[str]:
        """Prolong leases by `lease_s`; those that are this owner's no more (expired, cancelled)."""

    async def expire(self) -> int:
        """Requeue what was leased by owners that renew no more; returns the groups that changed.

        What has overrun its `timeout_s`, queued or leased, fails.
        """

    async def complete(self, lease: Lease, group: TrajectoryGroup) -> None:
        """Store the result.

        Raises:
            Fenced: the lease is another's by now, or was cancelled.
        """

    async def drop_filtered(self, lease: Lease, reason: str, mean_reward: float) -> None:
        """Record that the filter dropped the finished group. Raises as `complete`."""

    async def fail(self, lease: Lease, reason: str) -> None:
        """Record that the rollout ends without a result. Raises as `complete`."""

    async def requeue(self, lease: Lease, reason: str) -> None:
        """Put the rollout back; it keeps its place in the order. Raises as `complete`."""

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        version: PolicyVersion,
        max_staleness: int | None,
    ) -> Delivery:
        """Give out the consumer's `count` oldest ready groups, or none.

        With `max_staleness`, what has grown staler is dropped, what would be too stale next is given
        out first, and the batch is held back while one of the consumer's leased groups was admitted at
        `version - max_staleness` or before.

        Raises:
            Conflict: the delivery id was another consumer's, or its payloads were forgotten.
        """

    async def deliver_exactly(
        self, delivery_id: str, rollout_ids: Sequence[str], version: PolicyVersion
    ) -> Delivery:
        """Give out exactly these groups, or none.

        Raises:
            Fruitless: some of them ended without a result.
            NotFound: one of them was never submitted.
            Conflict: one of them was given out before, or the delivery id gave out others.
        """

    async def outstanding(self, consumer: str) -> int:
        """Groups of a consumer that are queued, leased or ready: what it may still be given."""

    async def consume(self, rollout_ids: Sequence[str], step: int, checkpoint_step: int) -> None:
        """Record consumption by a step; idempotent.

        Raises:
            Conflict: one was consumed by another step, or was not delivered.
        """

    async def give_back(self, consumer: str, step: int) -> int:
        """Make ready again what was delivered or consumed after `step`; returns the groups.

        What `consume` was told is safe in a checkpoint, and then is not, is queued to be played again.
        """

    async def cancel(self, rollout_ids: Sequence[str], reason: str) -> int:
        """End rollouts that are not consumed; returns the groups that were ended by this call."""

    async def cancel_all(self, consumer: str, reason: str) -> int:
        """End what the consumer has not consumed; returns the trajectories."""

    async def revive(self, rollout_ids: Sequence[str]) -> int:
        """Queue failed rollouts once more, with all their attempts; returns the groups."""

    async def get(self, rollout_id: str, with_payload: bool = False) -> Entry | None:
        """One rollout."""

    async def find(
        self,
        state: RolloutState | None = None,
        consumer: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> list[Entry]:
        """Rollouts, newest submission first; `before` is the last id of the page before."""

    async def events(self, rollout_id: str) -> list[Event]:
        """The log of one rollout, oldest first."""

    async def counts(self, consumer: str | None = None) -> LedgerCounts:
        """Trajectories by state, of one consumer or of all; cheap."""

    async def audit(self) -> LedgerAudit:
        """Recompute every state from the event log and compare."""

    async def compact(self, older_than_s: float) -> int:
        """Forget rollouts that ended so long ago, but for their part in counts and audit; the groups."""

    async def get_note(self, key: str) -> str | None:
        """A small durable value that belongs to the run."""

    async def put_note(self, key: str, value: str) -> None:
        """Store a small durable value: once this returns, it survives a power cut."""

    async def swap_note(self, key: str, old: str | None, new: str) -> bool:
        """`put_note` if the note is `old` (None: absent) still; whether it was."""

    async def close(self) -> None:
        """Flush and close."""


def row_of(entry: Entry) -> dict[str, Any]:
    """An entry as flat JSON, for exports and listings; without its payload."""
    return {
        "rollout_id": entry.request.rollout_id,
        "consumer": entry.request.consumer,
        "group_id": entry.request.prompt.group_id,
        "group_size": entry.request.prompt.group_size,
        "workflow": entry.request.workflow.name,
        "reward": entry.request.reward.name,
        "state": entry.state,
        "attempt": entry.attempt,
        "submitted_at": entry.submitted_at,
        "changed_at": entry.changed_at,
        "oldest_version": entry.oldest_version,
        "staleness": entry.staleness,
        "mean_reward": entry.mean_reward,
        "step": entry.step,
        "reason": entry.reason,
    }
