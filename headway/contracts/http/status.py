"""Health, and the picture of a service at a moment."""

from __future__ import annotations

from typing import Literal

from headway.contracts.config.base import Config
from headway.contracts.http.ledger import LedgerCounts
from headway.contracts.http.servers import ScaleResponse, ServerStatus
from headway.contracts.http.weights import WeightStatus
from headway.contracts.types import PolicyVersion


class AwayService(Config):
    """A service of a user's that does not answer."""

    url: str
    away_s: float
    """Seconds since the first call that it did not answer."""
    waiting: int
    """Calls that wait for it, at most one per trajectory."""


class StatusResponse(Config):
    """`GET /v1/status`."""

    version: PolicyVersion
    """The version that serves."""
    head: PolicyVersion = 0
    """Newest published version: numbers up to it are used up; above `version` after a rollback."""
    running: int
    """Number of running trajectories."""
    capacity: int
    """Trajectories that may start now."""
    max_staleness: int | None
    counts: LedgerCounts
    servers: list[ServerStatus] = []
    smallest_context_tokens: int | None = None
    """Tokens per sequence that every server can hold, prompt included; None if none reports its own."""
    largest_context_tokens: int | None = None
    """Tokens per sequence that some server can hold; more is refused when it is submitted. None if a
    server does not report its own, or none is there."""
    updates: int = 0
    """Committed weight updates."""
    updates_in_flight: int = 0
    """Committed updates during which at least one sequence was being generated."""
    generated_tokens: int = 0
    last_failures: list[str] = []
    services_away: list[AwayService] = []
    """Services that workflows and rewards call, and that this gateway waits for."""
    longest_stall_s: float = 0.0
    """Longest stand-still of this process's event loop since it serves, without time in which it waited
    for a CPU."""
    stalls: int = 0
    """Stand-stills of 0.1 s or longer."""


class HistoryPoint(Config):
    """State of one gateway over the seconds up to a moment."""

    at: float
    """Seconds since the epoch."""
    version: PolicyVersion
    queued: int
    leased: int
    ready: int
    delivered: int
    consumed: int
    """Trajectories by state, as `LedgerCounts`."""
    generated_tokens: int
    """Since the gateway started."""
    num_rewards: int = 0
    """Trajectories that this gateway finished since the point before."""
    mean_reward: float | None = None
    min_reward: float | None = None
    max_reward: float | None = None
    staleness: dict[int, int] = {}
    """Staleness at delivery by this gateway since the previous point: versions -> trajectories."""


class DashboardResponse(Config):
    """`GET /v1/dashboard`: what the page at `/ui` shows of the service; cheap."""

    service_version: str
    """Version of this package."""
    now: float
    """Seconds since the epoch, by the gateway's clock."""
    interval_s: float
    """Seconds between the points of the history."""
    status: StatusResponse
    weights: WeightStatus
    scale: ScaleResponse
    sessions_open: int
    """Open sessions of this gateway."""
    history: list[HistoryPoint]
    """Oldest first; those after `after`, if that was asked for."""


class HealthResponse(Config):
    status: Literal["ok"] = "ok"
