"""Whole experiments as a composition of sections; only checks between sections live here."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.base import Config
from headway.contracts.config.data import DataConfig
from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.config.rollout import RolloutConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.weight_sync import WeightSyncConfig


class ExperimentConfig(Config):
    """What every experiment has."""

    run_dir: str = Field("runs/default", min_length=1)
    """Folder of metrics, checkpoints and `config.resolved.yaml`."""
    model: TrainedModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _check_head(self) -> ExperimentConfig:
        if self.model.head != "lm":
            raise ValueError(
                f"model.head={self.model.head} predicts no tokens, which this experiment trains; "
                "set model.head=lm"
            )
        return self


class SFTExperiment(ExperimentConfig):
    """Supervised fine-tuning on prompt and completion."""

    type: Literal["sft"] = "sft"
    output_dir: str = Field(min_length=1)
    """Directory for the trained model and its tokenizer."""
    time_limit_s: float | None = Field(None, gt=0.0)
    """Stop after this many seconds even if steps are left; None has no limit."""


class GRPOExperiment(ExperimentConfig):
    """Asynchronous group-relative policy optimisation against a rollout service."""

    type: Literal["grpo"] = "grpo"
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    weight_sync: WeightSyncConfig
    recovery: RecoveryConfig = RecoveryConfig()

    @property
    def batch_trajectories(self) -> int:
        """B: trajectories consumed per version."""
        return self.data.batch_size * self.rollout.group_size

    @model_validator(mode="after")
    def _check(self) -> GRPOExperiment:
        if self.algorithm.kl_coef > 0:
            raise ValueError(
                f"algorithm.kl_coef={self.algorithm.kl_coef} wants a reference model, and this "
                "experiment has none; set algorithm.kl_coef=0"
            )
        if self.algorithm.num_minibatches > self.data.batch_size:
            raise ValueError(
                f"algorithm.num_minibatches={self.algorithm.num_minibatches} exceeds "
                f"data.batch_size={self.data.batch_size} prompts; a mini-batch holds whole groups"
            )
        if self.sampling.temperature == 0.0 and self.rollout.group_size > 1:
            raise ValueError(
                "sampling.temperature=0 gives equal siblings, so every advantage is 0; "
                "set a temperature above 0 or rollout.group_size=1"
            )
        return self
