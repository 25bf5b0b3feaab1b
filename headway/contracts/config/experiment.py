"""Whole experiments as a composition of sections; only checks between sections live here."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, model_validator

from headway.contracts.config.algorithm import AlgorithmConfig, PPOAlgorithmConfig
from headway.contracts.config.base import Config
from headway.contracts.config.critic import CriticConfig
from headway.contracts.config.data import (
    DataConfig,
    DemonstrationDataConfig,
    HeldOutConfig,
    JudgedPairDataConfig,
    PairDataConfig,
    RowsConfig,
)
from headway.contracts.config.dataflow import DataflowConfig, FixedDataflowConfig
from headway.contracts.config.evaluation import EvaluationConfig
from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.model import ModelConfig, TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.preference import PreferenceConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.config.reference import ReferenceConfig
from headway.contracts.config.rollout import RolloutConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.weight_sync import WeightSyncConfig

HEAD_LACKS = {"lm": "gives no value of a sequence", "value": "predicts no tokens"}


class ExperimentConfig(Config):
    """What every experiment has."""

    trained_head: ClassVar[Literal["lm", "value"]] = "lm"
    """What kind of head the experiment trains."""

    run_dir: str = Field("runs/default", min_length=1)
    """Folder of metrics, checkpoints and `config.resolved.yaml`."""
    model: TrainedModelConfig
    data: RowsConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _check_head(self) -> ExperimentConfig:
        head, wanted = self.model.head, self.trained_head
        if head != wanted:
            raise ValueError(
                f"model.head={head} {HEAD_LACKS[head]}, which this experiment trains; "
                f"set model.head={wanted}"
            )
        return self


class SupervisedExperiment(ExperimentConfig):
    """What experiments on a fixed data set have."""

    output_dir: str = Field(min_length=1)
    """Directory for the trained model and its tokenizer, in Hugging Face form."""
    time_limit_s: float | None = Field(None, gt=0.0)
    """Stop after this many seconds even if steps are left; None has no limit."""
    held_out: HeldOutConfig | None = None
    """Evaluate on rows that are not trained on; None does not."""
    recovery: RecoveryConfig = RecoveryConfig()
    dataflow: FixedDataflowConfig = FixedDataflowConfig()


class SFTExperiment(SupervisedExperiment):
    """Supervised fine-tuning on prompt and completion."""

    type: Literal["sft"] = "sft"
    data: DemonstrationDataConfig


class RWExperiment(SupervisedExperiment):
    """A reward model, by the Bradley-Terry loss on chosen and rejected answers."""

    trained_head: ClassVar[Literal["lm", "value"]] = "value"

    type: Literal["rw"] = "rw"
    data: JudgedPairDataConfig


class DPOExperiment(SupervisedExperiment):
    """Direct preference optimisation on chosen and rejected answers."""

    type: Literal["dpo"] = "dpo"
    data: PairDataConfig
    algorithm: PreferenceConfig = PreferenceConfig()
    reference: ModelConfig | None = None
    """The frozen model that the policy is compared with; None takes the one that the run starts from:
    with `model.lora` the policy's own base, otherwise a second copy."""


class RolloutExperiment(ExperimentConfig):
    """What experiments that learn from a rollout service have, whatever they learn by."""

    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig
    reference: ReferenceConfig = ReferenceConfig()
    teacher: ModelConfig | None = None
    """The model whose logprobs `algorithm.distillation_coef` learns from; it has the policy's tokens."""
    weight_sync: WeightSyncConfig
    recovery: RecoveryConfig = RecoveryConfig()
    evaluation: EvaluationConfig | None = None
    """Versions to score beside training; None scores none."""
    dataflow: DataflowConfig = DataflowConfig()

    @property
    def batch_trajectories(self) -> int:
        """B: trajectories that the service samples for a version, and counts as consumed by it."""
        return self.data.batch_size * self.rollout.group_size

    @model_validator(mode="after")
    def _check_sampling(self) -> RolloutExperiment:
        if self.evaluation is not None:
            self.evaluation.sampling_over(self.sampling)
        if self.sampling.temperature == 0.0 and self.rollout.group_size > 1:
            raise ValueError(
                "sampling.temperature=0 gives equal siblings, so every advantage is 0; "
                "set a temperature above 0 or rollout.group_size=1"
            )
        return self


class PolicyExperiment(RolloutExperiment):
    """Asynchronous policy optimisation against a rollout service."""

    algorithm: AlgorithmConfig = AlgorithmConfig()

    @model_validator(mode="after")
    def _check_models(self) -> PolicyExperiment:
        if self.reference != ReferenceConfig() and self.algorithm.kl_coef == 0:
            raise ValueError("reference keeps no policy near while algorithm.kl_coef=0; set it")
        if (self.teacher is None) != (self.algorithm.distillation_coef == 0):
            raise ValueError(
                f"algorithm.distillation_coef={self.algorithm.distillation_coef} "
                f"{'wants' if self.teacher is None else 'learns nothing of'} a teacher; "
                "set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> PolicyExperiment:
        if self.algorithm.num_minibatches > self.data.batch_size:
            raise ValueError(
                f"algorithm.num_minibatches={self.algorithm.num_minibatches} exceeds "
                f"data.batch_size={self.data.batch_size} prompts; a mini-batch holds whole groups"
            )
        return self


class GRPOExperiment(PolicyExperiment):
    """Asynchronous group-relative policy optimisation: the siblings of a prompt are the baseline."""

    type: Literal["grpo"] = "grpo"

    @model_validator(mode="after")
    def _check_critic(self) -> GRPOExperiment:
        if self.algorithm.gae_lambda != 1.0:
            raise ValueError(
                f"algorithm.gae_lambda={self.algorithm.gae_lambda} wants a critic; set type=ppo"
            )
        return self


class PPOExperiment(PolicyExperiment):
    """Asynchronous proximal policy optimisation: a critic is the baseline."""

    type: Literal["ppo"] = "ppo"
    algorithm: PPOAlgorithmConfig = PPOAlgorithmConfig()
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="after")
    def _check_warmup(self) -> PPOExperiment:
        if self.critic.warmup_steps >= self.trainer.total_steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves no step of "
                f"trainer.total_steps={self.trainer.total_steps} to the policy"
            )
        return self
