"""Whatever learns from a rollout service, told apart by `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from headway.contracts.config.critic import CriticConfig
from headway.contracts.config.experiment import GRPOExperiment, PolicyExperiment, PPOExperiment
from headway.contracts.config.ppo_code import (
    PPOCodeExperiment,
    PPOMathExperiment,
    VerifiedPPOExperiment,
)

PolicyLearner = PolicyExperiment | VerifiedPPOExperiment
"""An experiment whose policy learns from rollouts."""


def critic_of(config: PolicyLearner) -> CriticConfig | None:
    """What its critic learns by; None without one."""
    return config.critic if isinstance(config, PPOExperiment | VerifiedPPOExperiment) else None


def _grpo_unless_named(given: object) -> object:
    return {"type": "grpo", **given} if isinstance(given, dict) else given


RolloutExperimentConfig = Annotated[
    Annotated[
        GRPOExperiment | PPOExperiment | PPOCodeExperiment | PPOMathExperiment,
        Field(discriminator="type"),
    ],
    BeforeValidator(_grpo_unless_named),
]
