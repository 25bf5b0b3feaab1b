"""What the workers of a group are made of (`trainer.workers`)."""

from __future__ import annotations

from pydantic import Field, model_validator

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import Config, JsonObject
from headway.contracts.config.critic import CriticConfig, ValueModelConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.reference import ReferenceConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.trainer import TrainerConfig


class GenerationConfig(Config):
    """How a worker with the role rollout generates."""

    engine: str = Field("forward", min_length=1)
    """Registered rollout engine."""
    args: JsonObject = {}
    """Keyword arguments of the engine."""
    sampling: SamplingConfig = SamplingConfig()
    """How tokens are sampled; responses are as wide as its `max_new_tokens`."""
    pad_token_id: int = Field(0, ge=0)
    """What stands where a row has no token."""


class WorkersConfig(Config):
    """One for all roles: each reads the sections that it needs."""

    model: TrainedModelConfig
    """Of the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW of the policy, and its schedule."""
    trainer: TrainerConfig = TrainerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    reward_model: ValueModelConfig | None = None
    """Model of the role reward."""
    generation: GenerationConfig = GenerationConfig()

    @model_validator(mode="after")
    def _check(self) -> WorkersConfig:
        algorithm = self.algorithm
        if algorithm.proximal == "interpolate" or algorithm.m2_threshold is not None:
            raise ValueError(
                "algorithm.proximal=interpolate and algorithm.m2_threshold want versions, or the whole "
                "batch, which workers do not have; unset them"
            )
        if algorithm.num_minibatches != 1:
            raise ValueError(
                f"algorithm.num_minibatches={algorithm.num_minibatches} is for trainers without "
                "workers; note mini_batch_size in the batch's meta"
            )
        if self.reference.ema_eta is not None:
            raise ValueError("reference.ema_eta: the reference of workers stays as it is; unset it")
        return self
