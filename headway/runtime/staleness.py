"""The one place that admits, keeps or drops.

With batch size B in trajectories, bound η and committed version v (AReaL, arXiv:2505.24298, eq. 3):

    capacity = min(max_concurrent - running, (η + v + 1)·B - (accepted + running))

`accepted` counts every trajectory that was finished and kept since version 0, consumed or not; a
failed, requeued or dropped one is taken out again, so a version consumes exactly B of them and the
bound does not drift. `accepted` and `v` are restored together.

Admission alone bounds staleness only if groups are consumed in the order they were admitted. A
long generation is overtaken by short ones; `has_due_running` tells when one of those still in play
can only be consumed by the next batch, and `wait` then holds that batch back for it. So nothing is
wasted and nothing is consumed staler than η; `is_stale` drops what a crash let grow old.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.contracts.types import PolicyVersion


@dataclass(frozen=True, slots=True)
class StalenessSnapshot:
    """What must be restored together."""

    version: PolicyVersion
    accepted: int


class StalenessController:
    """Counts of one consumer; single-threaded, owned by the executor's event loop."""

    def __init__(self, max_concurrent: int, version: PolicyVersion = 0) -> None:
        self._max_concurrent = max_concurrent
        self._batch_size: int | None = None
        self._max_staleness: int | None = None
        self._version = version
        self._accepted = 0
        self._running: dict[str, tuple[int, PolicyVersion]] = {}

    @property
    def version(self) -> PolicyVersion:
        """Committed version."""
        return self._version

    @property
    def running(self) -> int:
        """Trajectories in play."""
        return sum(size for size, _ in self._running.values())

    @property
    def max_staleness(self) -> int | None:
        """η; None while no consumer is attached, when only `max_concurrent` bounds."""
        return self._max_staleness

    def capacity(self) -> int:
        """Trajectories that may start now; may be negative."""
        free = self._max_concurrent - self.running
        if self._batch_size is None or self._max_staleness is None:
            return free
        budget = (self._max_staleness + self._version + 1) * self._batch_size
        return min(free, budget - (self._accepted + self.running))

    def attach(self, batch_size: int, max_staleness: int, snapshot: StalenessSnapshot) -> None:
        """Bind to a consumer; `snapshot.accepted` = version·B + what it has not consumed yet."""
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._version = snapshot.version
        self._accepted = snapshot.accepted

    def snapshot(self) -> StalenessSnapshot:
        """The counters, to be restored with `attach`."""
        return StalenessSnapshot(self._version, self._accepted)

    def set_version(self, version: PolicyVersion) -> None:
        """A version was committed."""
        self._version = version

    def start(self, rollout_id: str, size: int) -> None:
        """A group of `size` trajectories is in play from now."""
        self._running[rollout_id] = (size, self._version)

    def accept(self, rollout_id: str) -> None:
        """It is finished and kept."""
        size, _ = self._running.pop(rollout_id)
        self._accepted += size

    def release(self, rollout_id: str) -> None:
        """It failed or goes back to the queue: its capacity returns."""
        self._running.pop(rollout_id)

    def drop(self, size: int) -> None:
        """A finished group was too stale to consume: its capacity returns."""
        self._accepted -= size

    def is_stale(self, oldest_version: PolicyVersion) -> bool:
        """Whether consumption now would exceed η."""
        return (
            self._max_staleness is not None and self._version - oldest_version > self._max_staleness
        )

    def has_due_running(self) -> bool:
        """Whether a group in play can be consumed by the next batch only."""
        if self._max_staleness is None:
            return False
        due = self._version - self._max_staleness
        return any(admitted <= due for _, admitted in self._running.values())
