"""Every experiment that learns from a rollout service, distinguished by `type`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from headway.contracts.config.critic import CriticConfig, ValueModelConfig
from headway.contracts.config.experiment import GRPOExperiment, PolicyExperiment, PPOExperiment
from headway.contracts.config.ppo_code import (
    PPOCodeExperiment,
    PPOMathExperiment,
    VerifiedPPOExperiment,
)

PolicyLearner = PolicyExperiment | VerifiedPPOExperiment
"""An experiment whose policy learns from rollouts."""


def critic_of(config: PolicyLearner) -> CriticConfig | None:
    """Return the settings of the experiment's critic; None without one."""
    return config.critic if isinstance(config, PPOExperiment | VerifiedPPOExperiment) else None


def reward_model_of(config: PolicyLearner) -> ValueModelConfig | None:
    """Return the model that scores answers; None if none does."""
    return config.reward_model if isinstance(config, VerifiedPPOExperiment) else None


def _grpo_unless_named(given: object) -> object:
    return {"type": "grpo", **given} if isinstance(given, dict) else given


RolloutExperimentConfig = Annotated[
    Annotated[
        GRPOExperiment | PPOExperiment | PPOCodeExperiment | PPOMathExperiment,
        Field(discriminator="type"),
    ],
    BeforeValidator(_grpo_unless_named),
]
