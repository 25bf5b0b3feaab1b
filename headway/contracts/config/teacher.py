"""Generation servers that a policy learns from."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from headway.contracts.config.base import Config
from headway.contracts.config.gateway import EnvironmentName
from headway.contracts.config.rollout import Url


class TeacherServersConfig(Config):
    """Teachers on generation servers, in place of a model that the trainer's ranks hold. Several are
    averaged: the policy learns the weighted mean of their logprobs, which is nearest to all of them."""

    urls: Annotated[tuple[Url, ...], Field(min_length=1, max_length=16)]
    """One generation server per teacher; they have the policy's tokens, and weights that stay."""
    weights: tuple[Annotated[float, Field(gt=0.0)], ...] = ()
    """Weight of each teacher, divided by their sum; empty weighs all the same."""
    token_env: EnvironmentName | None = None
    """Environment variable with the bearer token that the servers ask for."""
    connect_timeout_s: float = Field(120.0, gt=0.0)
    """Seconds to wait for a server that does not answer before the run stops."""
    request_timeout_s: float = Field(600.0, gt=0.0)
    """Seconds to wait for the logprobs of one sequence."""
    num_connections: int = Field(16, ge=1, le=256)
    """Sequences that a rank has scored at once."""

    @model_validator(mode="after")
    def _check(self) -> TeacherServersConfig:
        if self.weights and len(self.weights) != len(self.urls):
            raise ValueError(
                f"weights has {len(self.weights)} values for {len(self.urls)} urls; give one for each, "
                "or none"
            )
        return self

    @property
    def shares(self) -> tuple[float, ...]:
        """Weight of each teacher; their sum is 1."""
        weights = self.weights or (1.0,) * len(self.urls)
        return tuple(weight / sum(weights) for weight in weights)
