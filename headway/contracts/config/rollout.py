"""What the trainer asks of the rollout service."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from headway.contracts.config.base import Config, PartConfig
from headway.contracts.config.gateway import EnvironmentName
from headway.contracts.types import WorkflowRef

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$")]


class RolloutConfig(Config):
    url: Url | Annotated[tuple[Url, ...], Field(min_length=1, max_length=16)] = (
        "http://127.0.0.1:8000"
    )
    """Gateway, or one generation server alone; several are gateways that share a ledger, of which one
    after the other is asked until one answers."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token that the service asks for."""
    workflow: WorkflowRef = WorkflowRef(name="single_turn")
    """Registered workflow that plays a prompt."""
    reward: PartConfig
    """Registered verifier that scores a trajectory."""
    filter: PartConfig | None = None
    """Registered filter that keeps or drops a finished group; None keeps all."""
    oversampling: float = Field(1.0, ge=1.0, le=16.0)
    """Prompts submitted ahead, against those that a batch without drops needs."""
    group_size: int = Field(8, ge=1, le=1024)
    """Trajectories per prompt."""
    max_staleness: int = Field(2, ge=0)
    """Versions between sampling and consumption, at most (η); 0 is synchronous."""
    connect_timeout_s: float = Field(120.0, gt=0.0)
    """Seconds to wait for the service to answer, at the start and after it was lost."""
    wait_timeout_s: float = Field(3600.0, gt=0.0)
    """Seconds to wait for one batch before the run stops."""
