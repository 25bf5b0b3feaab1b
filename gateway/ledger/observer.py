"""Observers of what this gateway did with the ledger: how attempts ended, what was delivered.

Everything is reported exactly once, by the caller of the ledger: the executor or the service.
What another gateway does with the same store is for that gateway's observers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from headway.contracts.types import RolloutRequest, TrajectoryGroup

AttemptOutcome = Literal["ready", "filtered", "failed", "requeued"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of a rollout, from its lease to its end."""

    request: RolloutRequest
    outcome: AttemptOutcome
    seconds: float
    group: TrajectoryGroup | None = None
    """The result, if it was kept."""


class LedgerObserver(Protocol):
    """Hears what happened; must neither wait nor fail."""

    def ended(self, attempt: Attempt) -> None:
        """An attempt of this gateway ended."""

    def delivered(self, staleness: int, num_trajectories: int) -> None:
        """A group was delivered, `staleness` versions after its oldest token was sampled."""

    def expired(self, num_groups: int) -> None:
        """Leases of silent owners, or times of rollouts, ran out."""


class LedgerObservers:
    """Several observers as one."""

    def __init__(self, observers: Sequence[LedgerObserver]) -> None:
        self._observers = observers

    def ended(self, attempt: Attempt) -> None:
        for observer in self._observers:
            observer.ended(attempt)

    def delivered(self, staleness: int, num_trajectories: int) -> None:
        for observer in self._observers:
            observer.delivered(staleness, num_trajectories)

    def expired(self, num_groups: int) -> None:
        for observer in self._observers:
            observer.expired(num_groups)
