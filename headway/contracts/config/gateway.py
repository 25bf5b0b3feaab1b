"""The gateway's own settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from headway.contracts.config.base import Config

EnvironmentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""Names the variable that holds a secret: secrets never stand in a config."""


class ServiceConfig(Config):
    """Where a service listens."""

    host: str = "127.0.0.1"
    """Address to bind; nothing is encrypted, so bind to a private network only."""
    port: int = Field(0, ge=0, le=65535)
    """Port to bind; 0 takes a free one."""
    ready_file: str | None = None
    """File to write `{"url", "pid"}` into once the service answers."""
    max_body_bytes: int = Field(64 << 20, ge=1024)
    """Largest request body."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token that every request must carry; None asks for none."""
    drain_timeout_s: float = Field(5.0, ge=0.0)
    """After SIGTERM, seconds in which requests may end; what a generation server still generates
    then is answered with the tokens so far."""


def default_port(port: int) -> BeforeValidator:
    """A `service` section that names no port listens on this one."""
    return BeforeValidator(
        lambda given: {"port": port, **given} if isinstance(given, dict) else given
    )


class ExecutorConfig(Config):
    """Bounds on the rollouts in play."""

    max_concurrent: int = Field(512, ge=1)
    """Trajectories in play at once, at most."""
    max_queued: int = Field(65536, ge=1)
    """Trajectories waiting for their turn, at most; more submissions get 429."""
    rollout_timeout_s: float = Field(600.0, gt=0.0)
    """Seconds after which a rollout in play is cancelled and recorded as failed."""
    max_attempts: int = Field(5, ge=1)
    """Attempts per rollout while generation servers fail under it."""
    error_window: int = Field(128, ge=1)
    """The error budget looks at this many most recent rollouts."""
    error_budget: int = Field(16, ge=0)
    """Failures within the window that are tolerated; one more and `wait` raises."""
    reward_workers: int = Field(1, ge=1)
    """Processes that run verifiers."""
    reward_timeout_s: float = Field(10.0, gt=0.0)
    """Seconds after which a verifier is killed."""


class FleetConfig(Config):
    """How generation servers are watched."""

    lease_s: float = Field(10.0, gt=0.0)
    """A server that sent no heartbeat for this long is lost."""
    update_timeout_s: float = Field(300.0, gt=0.0)
    """Deadline of preparing a version on one server, upload included."""
    commit_timeout_s: float = Field(60.0, gt=0.0)
    """Deadline of committing a version on one server; under `update_policy: drain`, running sequences
    end first."""
    quorum: float = Field(0.5, gt=0.0, le=1.0)
    """Share of the live servers that must have staged a version before it is committed; 1 asks for
    all. The others are fenced until they have caught up."""
    straggler_s: float = Field(30.0, ge=0.0)
    """Seconds for the others to stage a version too, once the quorum has; who takes longer is fenced
    and catches up. Over a process group all are waited for."""
    commit_order: Literal["simultaneous", "rolling"] = "simultaneous"
    """All servers swap at once, or one after the other."""
    server_wait_s: float = Field(300.0, gt=0.0)
    """A request waits this long for a ready server with room before it fails."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token that the servers ask for."""


class GatewayConfig(Config):
    service: Annotated[ServiceConfig, default_port(8000)] = ServiceConfig(port=8000)
    tokenizer: str = Field(min_length=1)
    """Directory with tokenizer.json of the model that the servers run."""
    ledger: str = "ledger.sqlite"
    """SQLite file of the trajectory ledger; `:memory:` keeps nothing."""
    executor: ExecutorConfig = ExecutorConfig()
    fleet: FleetConfig = FleetConfig()
