"""Protocol of a trajectory ledger, role by role, and the states of a rollout.

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
from typing import Protocol

from gateway.ledger.records import Capacity, Delivery, Entry, Event, Lease
from headway.contracts.http.ledger import LedgerAudit, LedgerCounts
from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion, RolloutRequest, TrajectoryGroup


class RolloutQueue(Protocol):
    """Rollouts before and after they run: submission, cancellation, requeuing, forgetting."""

    async def submit(
        self,
        requests: Sequence[RolloutRequest],
        max_queued: int,
        max_queued_per_consumer: int | None = None,
    ) -> list[bool]:
        """Queue rollouts; per request whether it was new.

        Args:
            max_queued: trajectories that may wait in all.
            max_queued_per_consumer: trajectories that may wait for one consumer.
        Raises:
            Conflict: a known id with other content; nothing of this call is stored.
            QueueFull: more than `max_queued` trajectories would wait; nothing is stored.
        """

    async def cancel(self, rollout_ids: Sequence[str], reason: str) -> int:
        """End rollouts that are not consumed; returns the groups that were ended by this call."""

    async def cancel_all(self, consumer: str, reason: str) -> int:
        """End what the consumer has not consumed; returns the trajectories."""

    async def revive(self, rollout_ids: Sequence[str]) -> int:
        """Queue failed rollouts once more, with all their attempts; returns the groups."""

    async def compact(self, older_than_s: float) -> int:
        """Forget rollouts that ended so long ago, except in counts and audit; return the groups."""


class WorkQueue(Protocol):
    """The queue for those who run it: each lease ends with one report, or expires."""

    async def lease(self, admission: Capacity) -> list[Lease]:
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


class DeliveryQueue(Protocol):
    """Finished groups for their consumers: given out, consumed, given back."""

    async def deliver(
        self,
        delivery_id: str,
        count: int,
        consumer: str,
        version: PolicyVersion,
        max_staleness: int | None,
        learner: PolicyVersion | None = None,
    ) -> Delivery:
        """Give out the consumer's `count` oldest ready groups, or none.

        With `max_staleness`, what is staler for `version`, or for a `learner` ahead of it, is dropped,
        what would be too stale next is given out first, and the batch is held back while one of the
        consumer's leased groups was admitted at `version - max_staleness` or before.

        Raises:
            Conflict: the delivery id was another consumer's, or its payloads were forgotten.
        """

    async def deliver_exactly(
        self, delivery_id: str, rollout_ids: Sequence[str], version: PolicyVersion
    ) -> Delivery:
        """Give out exactly these groups, or none.

        Raises:
            RolloutsFailed: some of them ended without a result.
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

        What was consumed as safe in a checkpoint, and then is not, is queued to be run again.
        """


class LedgerReader(Protocol):
    """Queries to the ledger; they change nothing."""

    async def get(self, rollout_id: str, with_payload: bool = False) -> Entry | None:
        """One rollout."""

    async def find(
        self,
        state: RolloutState | None = None,
        consumer: str | None = None,
        limit: int = 100,
        before: str | None = None,
    ) -> list[Entry]:
        """Rollouts, newest submission first; `before` is the last id of the previous page."""

    async def events(self, rollout_id: str) -> list[Event]:
        """The log of one rollout, oldest first."""

    async def counts(self, consumer: str | None = None) -> LedgerCounts:
        """Trajectories by state, of one consumer or of all; cheap."""

    async def audit(self) -> LedgerAudit:
        """Recompute every state from the event log and compare."""

    async def revision(self) -> int:
        """A number that grows with every change, by any gateway."""


class KeyValueStore(Protocol):
    """Small durable values that belong to the run."""

    is_shared: bool
    """True if other gateways write to the store, too: then `revision` reports their changes."""

    async def get_value(self, key: str) -> str | None:
        """A small durable value that belongs to the run."""

    async def set_value(self, key: str, value: str) -> None:
        """Store a small durable value: once this returns, it survives a power cut."""

    async def compare_and_set(self, key: str, old: str | None, new: str) -> bool:
        """`set_value` if the note is `old` (None: absent) still; whether it was."""


class Ledger(RolloutQueue, WorkQueue, DeliveryQueue, LedgerReader, KeyValueStore, Protocol):
    """Durable record of every rollout: all roles, for the one that opens and closes the store."""

    async def connect(self) -> None:
        """Open the store as a visitor who leases nothing: for tools beside a running gateway."""

    async def open(self, owner: str, lease_s: float) -> None:
        """Open the store as one of its owners.

        What a former process had leased is requeued at once, in a store that others write to too if it
        was of the same place (`owner`); the rest is left to `expire`.
        """

    async def close(self) -> None:
        """Flush and close."""
