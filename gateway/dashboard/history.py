"""The last minutes of a gateway, in its memory: what the page draws when it is opened."""

from __future__ import annotations

from collections import Counter, deque

from gateway.ledger.observer import Attempt
from headway.contracts.http.status import HistoryPoint, StatusResponse

INTERVAL_S = 2.0
LENGTH = 300
"""Points that are kept: ten minutes."""


class ServiceHistory:
    """A `LedgerObserver` that keeps a bounded series; used on one event loop."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=LENGTH)
        self._rewards: list[float] = []
        self._staleness: Counter[int] = Counter()

    def ended(self, attempt: Attempt) -> None:
        if attempt.group is not None:
            self._rewards += [row.reward for row in attempt.group.trajectories]

    def delivered(self, staleness: int, num_trajectories: int) -> None:
        self._staleness[staleness] += num_trajectories

    def expired(self, num_groups: int) -> None:
        """No part of the picture."""

    def note(self, now: float, status: StatusResponse) -> None:
        """Add a point, with what happened since the previous one."""
        counts, rewards = status.counts, self._rewards
        self._points.append(
            HistoryPoint(
                at=now,
                version=status.version,
                queued=counts.queued,
                leased=counts.leased,
                ready=counts.ready,
                delivered=counts.delivered,
                consumed=counts.consumed,
                generated_tokens=status.generated_tokens,
                num_rewards=len(rewards),
                mean_reward=sum(rewards) / len(rewards) if rewards else None,
                min_reward=min(rewards, default=None),
                max_reward=max(rewards, default=None),
                staleness=dict(sorted(self._staleness.items())),
            )
        )
        self._rewards = []
        self._staleness.clear()

    def since(self, after: float) -> list[HistoryPoint]:
        """The points after a moment, oldest first."""
        return [point for point in self._points if point.at > after]
