"""The one place that admits, keeps or drops.

With batch size B in trajectories, bound η and committed version v (AReaL, arXiv:2505.24298, eq. 3):

    capacity = min(max_concurrent - running, (η + v + 1)·B - (accepted + running))

`accepted` counts every trajectory that was finished and kept since version 0, consumed or not; a
failed, requeued or dropped one is taken out again, so a version consumes exactly B of them and the
bound does not drift. `accepted` and `v` are restored together.

Admission alone bounds staleness only if groups are consumed in the order they were admitted. A
long generation is overtaken by short ones; `has_due_running` tells when one of those still in play
can only be consumed by the next batch, and `wait` then holds that batch back for it. So nothing is
wasted and nothing is consumed staler than η; what a crash let grow too old is dropped on delivery.

Only the attached consumer's rollouts are bounded; others share the concurrency.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from headway.contracts.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class StalenessSnapshot:
    """What must be restored together."""

    version: PolicyVersion
    accepted: int


@dataclass(frozen=True, slots=True)
class _Running:
    size: int
    admitted: PolicyVersion
    is_bounded: bool


class StalenessController:
    """Counts of one consumer, and of everything in play; owned by the executor's event loop."""

    def __init__(self, max_concurrent: int, version: PolicyVersion = 0) -> None:
        self._max_concurrent = max_concurrent
        self._batch_size: int | None = None
        self._max_staleness: int | None = None
        self._version = version
        self._accepted = 0
        self._running: dict[str, _Running] = {}

    @property
    def version(self) -> PolicyVersion:
        """Committed version."""
        return self._version

    @property
    def running(self) -> int:
        """Trajectories in play, whoever waits for them."""
        return sum(group.size for group in self._running.values())

    @property
    def max_staleness(self) -> int | None:
        """η; None while no consumer is attached."""
        return self._max_staleness

    def free(self) -> int:
        """Trajectories that may start without a bound on staleness."""
        return self._max_concurrent - self.running

    def capacity(self) -> int:
        """Trajectories of the attached consumer that may start now; may be negative."""
        if self._batch_size is None or self._max_staleness is None:
            return self.free()
        bounded = sum(group.size for group in self._running.values() if group.is_bounded)
        budget = (self._max_staleness + self._version + 1) * self._batch_size
        return min(self.free(), budget - (self._accepted + bounded))

    def attach(self, batch_size: int, max_staleness: int, snapshot: StalenessSnapshot) -> None:
        """Bind to a consumer; `snapshot.accepted` = version·B + what it has not consumed yet."""
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._version = snapshot.version
        self._accepted = snapshot.accepted

    def detach(self) -> None:
        """No consumer: only `max_concurrent` bounds."""
        self._batch_size = self._max_staleness = None
        self._accepted = 0

    def snapshot(self) -> StalenessSnapshot:
        """The counters, to be restored with `attach`."""
        return StalenessSnapshot(self._version, self._accepted)

    def set_version(self, version: PolicyVersion) -> None:
        """A version was committed."""
        self._version = version

    def start(self, rollout_id: str, size: int, is_bounded: bool = True) -> None:
        """A group of `size` trajectories is in play from now."""
        self._running[rollout_id] = _Running(size, self._version, is_bounded)

    def mark_bounded(self, rollout_id: str) -> None:
        """A group that may be in play belongs to the consumer, who attached after it had started."""
        if rollout_id in self._running:
            self._running[rollout_id] = replace(self._running[rollout_id], is_bounded=True)

    def accept(self, rollout_id: str) -> None:
        """It is finished and kept."""
        group = self._running.pop(rollout_id)
        self._accepted += group.size * group.is_bounded

    def release(self, rollout_id: str) -> None:
        """It failed, was cancelled or goes back to the queue: its capacity returns."""
        self._running.pop(rollout_id)

    def drop(self, size: int) -> None:
        """A finished group was too stale to consume: its capacity returns."""
        self._accepted -= size

    def has_due_running(self) -> bool:
        """Whether a group in play can be consumed by the next batch only."""
        if self._max_staleness is None:
            return False
        due = self._version - self._max_staleness
        return any(group.is_bounded and group.admitted <= due for group in self._running.values())
