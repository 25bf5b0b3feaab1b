"""Generation servers as they report themselves, and as the fleet reports them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from headway.contracts.config.base import MAX_COUNT, Config, Identifier
from headway.contracts.http.adapters import AdapterView
from headway.contracts.types import PolicyVersion

ServerState = Literal["joining", "ready", "reserved", "fenced", "quarantined", "draining", "lost"]


class DrainRequest(Config):
    """`POST /v1/servers/drain`: a server takes nothing new; what runs there goes on elsewhere."""

    server_id: Identifier
    drain: bool = True
    """False ends the drain: the server takes traffic again."""


class ScaleResponse(Config):
    """`GET /v1/scale`: how many generation servers the work asks for."""

    ready: int
    """Servers that take traffic."""
    wanted: int
    """Servers that would keep the queue short; never more than staleness lets work."""
    reason: str
    queue_wait_s: float | None
    """Estimated seconds until what waits now has been started; None before a rate is known."""
    kv_usage: float
    """Share of the key-value cache in use, mean over ready servers."""
    headroom: int | None
    """Number of trajectories that staleness lets start beyond those running; None without a bound."""


class ServerReport(Config):
    """`POST /v1/servers`: registration and heartbeat of a generation server."""

    server_id: Identifier
    url: str = Field(pattern=r"^https?://[^\s/]+$", max_length=512)
    version: PolicyVersion = Field(ge=0)
    running: int = Field(0, ge=0, lt=MAX_COUNT)
    queued: int = Field(0, ge=0, lt=MAX_COUNT)
    generated_tokens: int = Field(0, ge=0, lt=MAX_COUNT)
    busy_s: float = Field(0.0, ge=0.0)
    """Seconds in which the engine had work, since the server started."""
    uptime_s: float = Field(0.0, ge=0.0)
    digest: str = ""
    """Digest of the weights that serve; empty if it is not known."""
    kv_usage: float = Field(0.0, ge=0.0, le=1.0)
    """Share of the key-value cache in use."""
    preemptions: int = Field(0, ge=0, lt=MAX_COUNT)
    """Running sequences that lost their cache for want of memory, since the server started."""
    max_running: int = Field(0, ge=0, lt=MAX_COUNT)
    """Sequences that it decodes at once, at most; 0 if that is not known."""
    max_context_tokens: int | None = Field(None, ge=1, lt=MAX_COUNT)
    """Tokens per sequence that it can hold, prompt included; None if that is not known."""
    num_ranks: int = Field(1, ge=1, lt=MAX_COUNT)
    """Ranks that this server takes in a process group: those of its engine."""
    vocab_size: int | None = Field(None, ge=1, lt=MAX_COUNT)
    """Token ids that its model knows are below it; None if that is not known."""
    tokenizer_digest: str | None = Field(None, max_length=128)
    """Digest of its tokenizer; None if it has none."""
    adapters: tuple[AdapterView, ...] = ()
    """The adapters that it serves beside its base."""
    max_adapters: int = Field(0, ge=0, lt=MAX_COUNT)
    """Maximum number of adapters that it can serve; 0 if it serves none."""
    draining: bool = False
    """It is shutting down: what runs may end, nothing new is taken."""


class ServerReportResponse(Config):
    state: ServerState
    version: PolicyVersion
    """Committed version of the fleet."""
    reason: str = ""
    """See `ServerStatus`."""


class ServerStatus(ServerReport):
    state: ServerState
    reason: str = ""
    """Why it is fenced, quarantined or lost; else empty."""
