"""One SQLite transaction that many calls share: what they append is gathered, and written once.

With a savepoint, a call that fails takes back its own part: its statements and what it had gathered.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gateway.ledger.transitions import NEXT_STATE, STATES, EventName
from headway.contracts.http.rollouts import RolloutState

ALL = ""
"""Name that stands for all consumers in the tallies; no consumer has an empty name."""

COUNT = (
    "INSERT INTO tallies VALUES (?, ?, ?, ?) ON CONFLICT (state, consumer) DO UPDATE "
    "SET num_groups = num_groups + excluded.num_groups, "
    "trajectories = trajectories + excluded.trajectories"
)
GROW = "INSERT INTO numbers VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value"
REVISION = "revision"


ROW = "seq, consumer, size, state, num_events"
"""Columns of a `RolloutRow`."""


class RolloutRow(NamedTuple):
    """Fields of a rollout that a transition needs."""

    seq: int
    consumer: str
    size: int
    state: RolloutState
    num_events: int


class Transaction:
    """Transaction in which a call works; it stays on the worker thread."""

    def __init__(self, db: sqlite3.Connection, owner: str, lease_s: float, now: float) -> None:
        self.db = db
        self.owner = owner
        self.lease_s = lease_s
        self.now = now
        """Seconds since the epoch, the same for all calls."""
        self._counted: defaultdict[tuple[str, str], list[int]] = defaultdict(_nothing)
        """Groups and trajectories that came to a state and consumer, less those that went."""
        self._events: list[tuple[int, int, str, str | None, float]] = []
        self._num_changes = 0

    def tally(self, state: RolloutState, consumer: str = ALL) -> tuple[int, int]:
        """Groups and trajectories in a state."""
        row = self.db.execute(
            "SELECT num_groups, trajectories FROM tallies WHERE state = ? AND consumer = ?",
            (state, consumer),
        ).fetchone()
        groups, trajectories = row or (0, 0)
        more_groups, more = self._counted.get((state, consumer), (0, 0))
        return groups + more_groups, trajectories + more

    def trajectories(self, consumer: str = ALL) -> dict[RolloutState, int]:
        """Trajectories by state."""
        return {state: self.tally(state, consumer)[1] for state in STATES}

    def log(self, seq: int, number: int, event: EventName, detail: str | None = None) -> None:
        """Append to the log of one rollout; `number` counts its events from 1."""
        self._events.append((seq, number, event, detail, self.now))
        self._num_changes += 1

    def shift(
        self, consumer: str, size: int, source: RolloutState | None, target: RolloutState | None
    ) -> None:
        """Count one group from a state into another; None is outside of the ledger."""
        for state, sign in ((source, -1), (target, 1)):
            if state is None:
                continue
            for name in (consumer, ALL):
                counted = self._counted[(state, name)]
                counted[0] += sign
                counted[1] += sign * size

    def move(self, row: RolloutRow, event: EventName, reason: str) -> None:
        """One transition that leaves the rollout without a result, and why."""
        _, target = NEXT_STATE[event]
        self.db.execute(
            "UPDATE rollouts SET state = ?, reason = ?, has_payload = 0, num_events = num_events + 1, "
            "changed_at = ? WHERE seq = ?",
            (target, reason, self.now, row.seq),
        )
        self.log(row.seq, row.num_events + 1, event, reason)
        self.shift(row.consumer, row.size, row.state, target)

    def touch(self) -> None:
        """Something changed that is no transition."""
        self._num_changes += 1

    @contextmanager
    def savepoint(self) -> Iterator[None]:
        """Take back what is done within, if it raises."""
        counted = {key: list(counts) for key, counts in self._counted.items()}
        events, num_changes = list(self._events), self._num_changes
        self.db.execute("SAVEPOINT one")
        try:
            yield
        except BaseException:
            self._counted = defaultdict(_nothing, counted)
            self._events, self._num_changes = events, num_changes
            self.db.execute("ROLLBACK TO one")
            raise
        finally:
            self.db.execute("RELEASE one")

    def flush(self) -> None:
        """Write what was gathered: at the end, and before something reads events, tallies or revision."""
        if not self._num_changes:
            return
        self.db.executemany("INSERT INTO events VALUES (?, ?, ?, ?, ?)", self._events)
        self.db.executemany(COUNT, [(*key, *counts) for key, counts in self._counted.items()])
        self.db.execute(GROW, (REVISION, self._num_changes))
        self._counted.clear()
        self._events, self._num_changes = [], 0

    def flush_tallies(self, state: RolloutState) -> None:
        """`flush`, if the tallies of a state are not written yet."""
        if any(counted == state for counted, _ in self._counted):
            self.flush()


def _nothing() -> list[int]:
    return [0, 0]
