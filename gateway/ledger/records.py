"""Arguments and results of a ledger: leases, admissions, deliveries, and rollouts as it knows
them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.contracts.http.rollouts import RolloutState
from headway.contracts.types import PolicyVersion, RolloutRequest

OPEN_STATES: tuple[RolloutState, ...] = ("queued", "leased", "ready", "delivered")
"""A rollout in one of these may still be consumed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One rollout to run."""

    request: RolloutRequest
    attempt: int
    """1 for the first, and for the first after the rollout was revived."""
    age_s: float = 0.0
    """Seconds since its submission, or since it was revived."""
    fence: int = 0
    """Grows with every lease of this rollout: a report under one that is not the newest is refused."""

    @property
    def rollout_id(self) -> str:
        """Id of the request's rollout."""
        return self.request.rollout_id

    @property
    def key(self) -> str:
        """Names this lease: a rollout that goes back to the queue may be leased before it is let go."""
        return f"{self.request.rollout_id}#{self.fence}"


@dataclass(frozen=True, slots=True)
class Capacity:
    """Number of trajectories that may start now, and the version to count against."""

    version: PolicyVersion
    """Committed; recorded as the version that a lease was admitted at."""
    free: int
    """Number of trajectories that this owner has room for, for any consumer."""
    consumer: str | None = None
    """The attached consumer, whose rollouts are bounded in staleness; the queue of the others is a line
    of its own, and neither blocks the other."""
    budget: int | None = None
    """Trajectories of the attached consumer that may be leased, ready, delivered or consumed, at most:
    what the bound allows at this version. None has no bound."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """Result of a `deliver` call."""

    payloads: tuple[bytes, ...] | None
    """One codec payload per group, in submission order; None when fewer than asked are ready."""
    num_ready: int
    """Groups that are ready."""
    dropped: int
    """Trajectories that this call dropped as too stale."""
    is_held_back: bool = False
    """A running group can be consumed by this batch only, so the batch waits for it."""
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
    """Staleness at delivery, in versions."""
    reason: str | None
    step: int | None
    """Step that consumed it."""
    mean_reward: float | None
    payload: bytes | None = None
    """The codec payload, while it is kept and if it was asked for."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the event log."""

    event: str
    detail: str | None
    at: float


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
