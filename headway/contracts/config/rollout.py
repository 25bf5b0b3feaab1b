"""Requests of the trainer to the rollout service."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from headway.contracts.config.base import ComponentConfig, Config, WorkflowRef
from headway.contracts.config.gateway import EnvironmentName

Url = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]+$")]


class RolloutConfig(Config):
    url: Url | Annotated[tuple[Url, ...], Field(min_length=1, max_length=16)] = (
        "http://127.0.0.1:8000"
    )
    """Gateway, or one generation server alone; several are gateways that share a ledger: one
    after the other is asked until one answers."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token that the service asks for."""
    workflow: WorkflowRef = WorkflowRef(name="single_turn")
    """Registered workflow that runs a prompt."""
    reward: ComponentConfig
    """Registered verifier that scores a trajectory."""
    filter: ComponentConfig | None = None
    """Registered filter that keeps or drops a finished group; None keeps all."""
    oversampling: float = Field(1.0, ge=1.0, le=16.0)
    """Prompts submitted ahead, against those that a batch without drops needs."""
    group_size: int = Field(8, ge=1, le=1024)
    """Trajectories per prompt."""
    max_staleness: int = Field(2, ge=0)
    """Maximum number of versions between sampling and consumption (η); 0 is synchronous."""
    connect_timeout_s: float = Field(120.0, gt=0.0)
    """Seconds to wait for the service to answer, at the start and after it was lost."""
    wait_timeout_s: float = Field(3600.0, gt=0.0)
    """Seconds to wait for one batch before the run stops."""

    @property
    def has_greedy_sample(self) -> bool:
        """True if the first sample of each group takes the most likely tokens."""
        return bool(self.workflow.args.get("greedy_first", False))
