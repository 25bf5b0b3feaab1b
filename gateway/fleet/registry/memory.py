"""The registry of one gateway alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.fleet.registry.base import SharedReport
from headway.contracts.errors import NotFound
from headway.contracts.http.servers import ServerReport
from headway.runtime.clock import monotonic


@dataclass(slots=True)
class _Entry:
    report: ServerReport
    gateway: str
    number: int
    seen_at: float
    lease_s: float


class MemoryRegistry:
    """`Registry` that ends with its process."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._held: set[str] = set()
        self._number = 0

    async def open(self) -> None:
        pass

    async def announce(
        self,
        gateway: str,
        reports: Sequence[ServerReport],
        lease_s: float,
        ages_s: Sequence[float] | None = None,
    ) -> None:
        self._expire()
        now = monotonic()
        for report, age_s in zip(reports, ages_s or [0.0] * len(reports), strict=True):
            self._number += 1
            self._entries[report.server_id] = _Entry(
                report, gateway, self._number, now - age_s, lease_s
            )

    async def members(self) -> list[SharedReport]:
        self._expire()
        now = monotonic()
        return [
            SharedReport(
                entry.report, entry.gateway, entry.number, now - entry.seen_at, name in self._held
            )
            for name, entry in sorted(self._entries.items())
        ]

    async def forget(self, server_id: str) -> None:
        self._entries.pop(server_id, None)
        self._held.discard(server_id)

    async def set_draining(self, server_id: str, drain_requested: bool) -> None:
        self._expire()
        if server_id not in self._entries:
            raise NotFound(f"no server {server_id!r} has reported lately")
        if drain_requested:
            self._held.add(server_id)
        else:
            self._held.discard(server_id)

    async def close(self) -> None:
        pass

    def _expire(self) -> None:
        now = monotonic()
        for name, entry in list(self._entries.items()):
            if now - entry.seen_at > entry.lease_s:
                del self._entries[name]
