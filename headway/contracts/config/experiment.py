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
    MarginPairDataConfig,
    PairDataConfig,
    RowsConfig,
)
from headway.contracts.config.dataflow import DataflowConfig, RowsDataflowConfig
from headway.contracts.config.evaluation import EvaluationConfig
from headway.contracts.config.frequency import ExportConfig
from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.model import RankModelConfig, TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.preference import PreferenceConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.config.reference import ReferenceConfig
from headway.contracts.config.rollout import RolloutConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.teacher import TeacherServersConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.weight_sync import WeightSyncConfig

HEAD_LACKS = {"lm": "gives no value of a sequence", "value": "predicts no tokens"}


class ExperimentConfig(Config):
    """Settings that every experiment has."""

    trained_head: ClassVar[Literal["lm", "value"]] = "lm"
    """Kind of head that the experiment trains."""

    run_dir: str = Field("runs/default", min_length=1)
    """Folder of metrics, checkpoints and `config.resolved.yaml`."""
    model: TrainedModelConfig
    data: RowsConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    metrics: MetricsConfig = MetricsConfig()
    export: ExportConfig = ExportConfig()

    @model_validator(mode="after")
    def _check_head(self) -> ExperimentConfig:
        head, wanted = self.model.head, self.trained_head
        if head != wanted:
            raise ValueError(
                f"model.head={head} {HEAD_LACKS[head]}, which this experiment trains; "
                f"set model.head={wanted}"
            )
        if self.optimizer.type == "empty":
            raise ValueError("optimizer.type=empty trains nothing; set optimizer.type=adam")
        return self


class SupervisedExperiment(ExperimentConfig):
    """Settings of experiments on a fixed data set."""

    output_dir: str = Field(min_length=1)
    """Directory for the trained model and its tokenizer, in Hugging Face form."""
    time_limit_s: float | None = Field(None, gt=0.0)
    """Stop after this many seconds even if steps are left; None has no limit."""
    held_out: HeldOutConfig | None = None
    """Evaluate on rows that are not trained on; None does not."""
    recovery: RecoveryConfig = RecoveryConfig()
    dataflow: RowsDataflowConfig = RowsDataflowConfig()


class SFTExperiment(SupervisedExperiment):
    """Supervised fine-tuning on prompt and completion."""

    type: Literal["sft"] = "sft"
    data: DemonstrationDataConfig


class RWExperiment(SupervisedExperiment):
    """A reward model, by the Bradley-Terry loss on chosen and rejected answers."""

    trained_head: ClassVar[Literal["lm", "value"]] = "value"

    type: Literal["rw"] = "rw"
    data: MarginPairDataConfig


class DPOExperiment(SupervisedExperiment):
    """Direct preference optimisation on chosen and rejected answers."""

    type: Literal["dpo"] = "dpo"
    data: PairDataConfig
    algorithm: PreferenceConfig = PreferenceConfig()
    reference: RankModelConfig | None = None
    """The frozen model that the policy is compared with; None takes the one that the run starts from:
    with `model.lora` the policy's own base, otherwise a second copy."""

    @property
    def has_base_reference(self) -> bool:
        """True if the reference is the policy without its adapters, so that no second copy is
        held."""
        return self.model.lora is not None and self.reference is None


class RolloutExperiment(ExperimentConfig):
    """Settings of experiments that learn from a rollout service, whatever the algorithm."""

    data: DataConfig
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig
    reference: ReferenceConfig = ReferenceConfig()
    teacher: RankModelConfig | None = None
    """The model whose logprobs `algorithm.distillation_coef` learns from; it has the policy's tokens."""
    teacher_servers: TeacherServersConfig | None = None
    """One or several such models on generation servers, in place of `teacher`."""
    weight_sync: WeightSyncConfig
    recovery: RecoveryConfig = RecoveryConfig()
    evaluation: EvaluationConfig | None = None
    """Versions to score beside training; None scores none."""
    dataflow: DataflowConfig = DataflowConfig()

    @property
    def batch_trajectories(self) -> int:
        """B: trajectories that the service samples for a version, and counts as consumed by it."""
        return self.data.batch_size * self.rollout.group_size

    @property
    def has_teacher(self) -> bool:
        """True if the policy learns from a teacher's logprobs."""
        return self.teacher is not None or self.teacher_servers is not None

    @property
    def has_base_reference(self) -> bool:
        """True if the reference is the policy without its adapters, so that no second copy is
        held."""
        has_adapters, reference = self.model.lora is not None, self.reference
        return has_adapters and reference.path is None and reference.ema_eta is None

    @property
    def scores_rollouts_later(self) -> bool:
        """True if the trainer has answers scored once it has received them, beside the models'
        inferences; otherwise the service scores each rollout as it ends."""
        return False

    @property
    def reads_greedy_samples(self) -> bool:
        """True if a group may have a sample that took the most likely tokens."""
        return False

    @model_validator(mode="after")
    def _check_greedy_samples(self) -> RolloutExperiment:
        if self.rollout.has_greedy_sample and not self.reads_greedy_samples:
            raise ValueError(
                "rollout.workflow.args.greedy_first samples one answer unlike its siblings, which only "
                "algorithm.advantage.type=remax reads; leave it out"
            )
        return self

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
        if self.has_teacher == (self.algorithm.distillation_coef == 0):
            raise ValueError(
                f"algorithm.distillation_coef={self.algorithm.distillation_coef} "
                f"{'learns nothing of' if self.has_teacher else 'wants'} a teacher; "
                "set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _check_teacher(self) -> PolicyExperiment:
        if self.teacher is not None and self.teacher_servers is not None:
            raise ValueError("teacher and teacher_servers are two sources of one column; set one")
        sampling = self.sampling
        is_cut = sampling.top_k is not None or sampling.top_p < 1.0 or sampling.min_p > 0.0
        if self.algorithm.distillation_top_k:
            if is_cut:
                raise ValueError(
                    f"sampling has top_k={sampling.top_k}, top_p={sampling.top_p} and "
                    f"min_p={sampling.min_p}, and algorithm.distillation_top_k compares whole "
                    "distributions; leave these at their defaults"
                )
            if self.teacher_servers is not None and len(self.teacher_servers.urls) > 1:
                raise ValueError(
                    "algorithm.distillation_top_k takes the likeliest tokens of one teacher, and "
                    f"teacher_servers.urls has {len(self.teacher_servers.urls)}; give one"
                )
            if not self.has_teacher:
                raise ValueError("algorithm.distillation_top_k wants a teacher; set one, or 0")
        if self.teacher_servers is not None and (is_cut or sampling.temperature != 1.0):
            raise ValueError(
                f"sampling has temperature={sampling.temperature}, top_k={sampling.top_k}, "
                f"top_p={sampling.top_p} and min_p={sampling.min_p}, and teacher_servers score prompts "
                "at temperature 1 and over all tokens only; leave these at their defaults, or take a "
                "teacher on the trainer's ranks (teacher.path)"
            )
        return self

    @property
    def reads_greedy_samples(self) -> bool:
        """True if the estimator compares with a group's greedy sample."""
        return self.algorithm.advantage.type in ("remax", "plugin")

    @model_validator(mode="after")
    def _check_remax(self) -> PolicyExperiment:
        size = self.rollout.group_size
        is_alone = size == 1 or not self.rollout.has_greedy_sample
        if self.algorithm.advantage.type == "remax" and is_alone:
            raise ValueError(
                "algorithm.advantage.type=remax compares with a group's greedy sample; set "
                f"rollout.workflow.args.greedy_first=true, and rollout.group_size={size} to 2 or more"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> PolicyExperiment:
        self.algorithm.check_batch(self.data.batch_size)
        return self


class GRPOExperiment(PolicyExperiment):
    """Asynchronous group-relative policy optimisation: the siblings of a prompt are the baseline."""

    type: Literal["grpo"] = "grpo"

    @model_validator(mode="after")
    def _check_critic(self) -> GRPOExperiment:
        advantage = self.algorithm.advantage
        if advantage.critic == "needed":
            raise ValueError(
                f"algorithm.advantage.type={advantage.type} wants a critic; set type=ppo, or another "
                "estimator"
            )
        return self


class PPOExperiment(PolicyExperiment):
    """Asynchronous proximal policy optimisation: a critic is the baseline."""

    type: Literal["ppo"] = "ppo"
    algorithm: PPOAlgorithmConfig = PPOAlgorithmConfig()
    critic: CriticConfig = CriticConfig()

    @model_validator(mode="after")
    def _check_estimator(self) -> PPOExperiment:
        advantage = self.algorithm.advantage
        if advantage.critic == "unused":
            raise ValueError(
                f"algorithm.advantage.type={advantage.type} reads no values of a critic; set "
                "algorithm.advantage.type=gae, or type=grpo for a run without a critic"
            )
        return self

    @model_validator(mode="after")
    def _check_warmup(self) -> PPOExperiment:
        is_known = self.trainer.total_epochs is None
        if is_known and self.critic.warmup_steps >= self.trainer.total_steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} leaves no step of "
                f"trainer.total_steps={self.trainer.total_steps} to the policy"
            )
        return self
