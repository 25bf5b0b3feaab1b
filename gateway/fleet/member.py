"""One generation server as a gateway knows it.

    joining ─► ready, reserved ◄─► fenced        draining, lost: nothing more goes there

`ready` takes traffic, `reserved` that of the one version that it stays at. One with another version than
it should is `joining` or `fenced` until it has caught up; `publication` decides that. One that is ready
and fails requests is shown as `quarantined`: it takes no traffic, but takes part in publications.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.fleet.health import Health
from headway.contracts.http.servers import ServerReport, ServerState, ServerStatus
from headway.contracts.http.weights import WeightRecord
from headway.contracts.types import PolicyVersion

LEAVING: frozenset[ServerState] = frozenset({"draining", "lost"})
SERVING: frozenset[ServerState] = frozenset({"ready", "reserved"})


@dataclass(eq=False)
class Member:
    """One generation server."""

    report: ServerReport
    """Newest report; version and digest also from its answer to a commit."""
    state: ServerState
    last_seen: float
    health: Health
    reason: str = ""
    """Why it was fenced or lost the last time."""
    mismatch: str = ""
    """Why its model does not go with this gateway's tokenizer; empty if it does."""
    lost_at: float = 0.0
    has_died: bool = False
    """It was lost with what it worked on: it broke off the connections, and did not just fall silent."""
    is_own: bool = True
    """It reports to this gateway, which brings it to the committed version."""
    drain_requested: bool = False
    """It drains by order, until that is undone."""
    busy_until: float = 0.0
    """It has no room before this moment (monotonic clock)."""
    outstanding: int = 0
    """Tokens that it has still to hold or sample."""
    num_deviations: int = 0
    """Reports of another version than the committed one, in a row."""
    deviates_from: WeightRecord | None = None
    """Committed version when the last of them was looked at."""
    is_publishing: bool = False
    """It takes part in a transaction, which decides what it serves."""
    catching_up: asyncio.Task[None] | None = None
    aims_at: WeightRecord | None = None
    """Version to which it is being brought."""

    @property
    def name(self) -> str:
        """Id of the server."""
        return self.report.server_id

    @property
    def capacity(self) -> int:
        """Sequences that it decodes at once; 0 if it does not say."""
        return self.report.max_running

    @property
    def adapters(self) -> dict[str, PolicyVersion]:
        """Version of each adapter that it serves, by name."""
        return {one.name: one.version for one in self.report.adapters}

    @property
    def is_leaving(self) -> bool:
        """It drains or is lost."""
        return self.state in LEAVING

    @property
    def is_serving(self) -> bool:
        """It takes requests, if only for one version."""
        return self.state in SERVING

    @property
    def shown_state(self) -> ServerState:
        """State, as it is reported to others."""
        is_ill = self.is_serving and self.health.is_quarantined
        return "quarantined" if is_ill else self.state

    @property
    def status(self) -> ServerStatus:
        """Its last report, its state and the reason of that; nothing runs at one that is lost."""
        state = self.shown_state
        reasons = {"quarantined": self.health.reason, "fenced": self.reason, "lost": self.reason}
        idle = {"running": 0, "queued": 0, "kv_usage": 0.0} if self.state == "lost" else {}
        seen = {**self.report.model_dump(), **idle}
        return ServerStatus(**seen, state=state, reason=reasons.get(state, ""))

    def is_free(self, now: float) -> bool:
        """True if a request may be sent to it."""
        return self.is_serving and self.busy_until <= now and self.health.admits(now)

    def holds(self, num_tokens: int) -> bool:
        """True if it can hold a sequence; also while it does not report its limit."""
        limit = self.report.max_context_tokens
        return limit is None or num_tokens <= limit

    def free_at(self) -> float:
        """Time when it may be free, as far as that is known; infinite while a trial goes on."""
        until = self.health.until
        return self.busy_until if until is None else max(self.busy_until, until)

    @property
    def is_catching_up(self) -> bool:
        """It is being brought to the committed version."""
        return self.catching_up is not None and not self.catching_up.done()
