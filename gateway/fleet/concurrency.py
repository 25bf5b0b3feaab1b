"""Bound on the running trajectories: fewer while servers run out of cache, more while they have
room.

Additive increase, multiplicative decrease. Servers differ, so each counts by its capacity: where one
of eight equal servers preempts, the eighth of the bound that is its own is halved.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gateway.fleet.routing import shares
from headway.contracts.http.servers import ServerStatus
from headway.runtime.clock import monotonic

FULL = 0.8
"""Share of a cache in use from which a server has no room for more trajectories."""
GROWTH_S = 64.0
"""Seconds in which the bound grows from nothing to all, while every server has room."""
CUT_INTERVAL_S = 1.0
"""Seconds after a reduction in which preemptions may still be due to the trajectories that were in
play before it."""


class AdaptiveBound:
    """`limit` moves between `min_concurrent` and `max_concurrent`; it begins at the latter."""

    def __init__(self, max_concurrent: int, min_concurrent: int) -> None:
        self._most = float(max_concurrent)
        self._least = float(min(min_concurrent, max_concurrent))
        self._limit = self._most
        self._preemptions: dict[str, int] = {}
        self._hurt: set[str] = set()
        self._last_cut = self._last_look = float("-inf")

    @property
    def limit(self) -> int:
        """Number of trajectories that may run."""
        return int(self._limit)

    def observe(self, servers: Sequence[ServerStatus], now: float | None = None) -> int:
        """Take what the servers reported; the limit from now on.

        Args:
            servers: all of them; those that are ready count.
            now: seconds of a clock that never goes back.
        """
        now = monotonic() if now is None else now
        ready = {server.server_id: server for server in servers if server.state == "ready"}
        self._note_preemptions(ready.values())
        parts = shares({name: server.max_running for name, server in ready.items()})
        if self._hurt & parts.keys():
            if now - self._last_cut >= CUT_INTERVAL_S:
                self._cut(sum(parts.get(name, 0.0) for name in self._hurt))
                self._hurt.clear()
                self._last_cut = now
        elif self._last_look > float("-inf"):
            room = sum(parts[name] for name, server in ready.items() if _has_room(server))
            self._grow(room * (now - self._last_look) / GROWTH_S)
        self._last_look = now
        return self.limit

    def _note_preemptions(self, ready: Collection[ServerStatus]) -> None:
        for server in ready:
            before = self._preemptions.get(server.server_id, server.preemptions)
            if server.preemptions > before:
                self._hurt.add(server.server_id)
        self._preemptions = {server.server_id: server.preemptions for server in ready}
        self._hurt &= self._preemptions.keys()

    def _cut(self, part: float) -> None:
        self._limit = max(self._least, self._limit * (1.0 - part / 2.0))

    def _grow(self, part: float) -> None:
        self._limit = min(self._most, self._limit + part * self._most)


def _has_room(server: ServerStatus) -> bool:
    return server.kv_usage < FULL and server.queued == 0
