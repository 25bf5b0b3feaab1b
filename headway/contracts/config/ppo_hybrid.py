"""`type: ppo-hybrid`: one controller over groups of workers that generate and train by turns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from headway.contracts.config.base import Config, JsonObject
from headway.contracts.config.data import DataConfig
from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.config.recovery import RecoveryConfig
from headway.contracts.config.sampling import SamplingConfig
from headway.contracts.config.workers import WorkersConfig

WorkerRole = Literal["actor_rollout", "ref", "critic", "reward"]


class ResourcePoolConfig(Config):
    """Worker processes, one per rank; roles in one pool share them, and their devices."""

    num_workers: int = Field(1, ge=1)
    """Number of workers."""
    devices: tuple[str, ...] = ()
    """GPU of each worker, as CUDA_VISIBLE_DEVICES names it, of `launcher: processes`; empty takes those
    after the devices of the pools before. Pools that name the same ones share them."""
    num_cpus: float = Field(1.0, ge=0.0)
    """CPU cores that Ray reserves for each worker."""
    num_gpus: float | None = Field(None, ge=0.0)
    """GPUs that Ray reserves for each worker; None is one where the cluster has GPUs, and else none."""

    @model_validator(mode="after")
    def _check(self) -> ResourcePoolConfig:
        if self.devices and len(self.devices) != self.num_workers:
            raise ValueError(
                f"devices names {len(self.devices)} GPUs for {self.num_workers} workers; name one "
                "for each"
            )
        return self


class WorkerGroupsConfig(Config):
    """Where the roles run."""

    launcher: Literal["processes", "ray"] = "processes"
    """Processes of this machine, or actors of a Ray cluster."""
    ray_address: str | None = None
    """Address of the cluster; None joins the one that RAY_ADDRESS names, or starts one on this
    machine."""
    pools: dict[str, ResourcePoolConfig] = Field(
        {"global_pool": ResourcePoolConfig()}, min_length=1
    )
    """Resource pools by name."""
    placement: dict[WorkerRole, str] = {}
    """Role -> its pool; roles that are not named run in the first one. Calls to roles of different pools
    overlap where neither waits for the other."""
    start_timeout_s: float = Field(300.0, gt=0.0)
    """Seconds until a worker must have started."""
    timeout_s: float | None = Field(None, gt=0.0)
    """Seconds for each call; None waits as long as all workers live."""

    @model_validator(mode="after")
    def _check(self) -> WorkerGroupsConfig:
        for role, pool in self.placement.items():
            if pool not in self.pools:
                raise ValueError(
                    f"placement.{role}={pool} is no pool; known: {', '.join(self.pools)}"
                )
        return self

    def pool_of(self, role: WorkerRole) -> str:
        """Return the name of the pool that a role runs in."""
        return self.placement.get(role, next(iter(self.pools)))


class ProfilerConfig(Config):
    """Profiles of steps, by PyTorch's profiler, as Chrome traces in `run_dir/profiles`."""

    steps: tuple[int, ...] = ()
    """Steps to profile, from 0."""
    ranks: tuple[int, ...] = (0,)
    """Ranks of each pool that are profiled."""


class WorkerEvaluationConfig(Config):
    """Evaluation of the policy by the workers, between steps."""

    data: JsonObject
    """Fields of `data` that differ from those of training, at least `path`."""
    limit: int | None = Field(None, ge=1)
    """Number of prompts, from the first one; None takes every row."""
    every_steps: int = Field(10, ge=1)
    """Steps between evaluations; the last step has one, too."""
    sampling: JsonObject = {"temperature": 0.0}
    """Fields of `sampling` that differ from those of training; greedy unless it says otherwise."""

    def data_over(self, base: DataConfig) -> DataConfig:
        """Return the data section of its prompts."""
        return DataConfig.model_validate({**base.model_dump(), **self.data})

    def sampling_over(self, base: SamplingConfig) -> SamplingConfig:
        """Return the sampling configuration that it uses."""
        return SamplingConfig.model_validate({**base.model_dump(), **self.sampling})

    @model_validator(mode="after")
    def _check(self) -> WorkerEvaluationConfig:
        DataConfig.model_validate(self.data)
        SamplingConfig.model_validate(self.sampling)
        return self


class PPOHybridExperiment(WorkersConfig, ExperimentConfig):
    """Synchronous PPO or GRPO by one controller over groups of workers, with the hybrid engine."""

    type: Literal["ppo-hybrid"] = "ppo-hybrid"
    data: DataConfig
    group_size: int = Field(8, ge=1)
    """Responses per prompt."""
    workers: WorkerGroupsConfig = WorkerGroupsConfig()
    recovery: RecoveryConfig = RecoveryConfig()
    evaluation: WorkerEvaluationConfig | None = None
    """Prompts to score beside training; None scores none."""
    profiler: ProfilerConfig = ProfilerConfig()

    @property
    def has_reference(self) -> bool:
        """True if the policy is kept near a reference."""
        return self.algorithm.kl_coef > 0

    @property
    def mini_batch_rows(self) -> int:
        """Rows of a mini-batch: whole groups."""
        return -(-self.data.batch_size // self.algorithm.num_minibatches) * self.group_size

    @model_validator(mode="after")
    def _check_minibatches(self) -> PPOHybridExperiment:
        self.algorithm.check_batch(self.data.batch_size)
        return self

    @model_validator(mode="after")
    def _check_roles(self) -> PPOHybridExperiment:
        algorithm, sampling = self.algorithm, self.sampling
        advantage = algorithm.advantage
        conflicts = (
            (
                self.reward.rule is None and self.reward.model is None,
                "nothing scores responses; set reward.rule or reward.model",
            ),
            (
                self.critic is None and advantage.critic == "needed",
                f"algorithm.advantage.type={advantage.type} wants a critic; set critic",
            ),
            (
                self.critic is not None and advantage.critic == "unused",
                f"algorithm.advantage.type={advantage.type} reads no values of a critic; set "
                "algorithm.advantage.type=gae, or leave out critic",
            ),
            (
                advantage.type == "remax",
                "algorithm.advantage.type=remax wants a greedy response, and workers sample none; "
                "choose another",
            ),
            (
                self.critic is None and sampling.temperature == 0.0 and self.group_size > 1,
                "sampling.temperature=0 gives equal siblings, so every advantage is 0; set it above 0",
            ),
            (
                algorithm.dense_rewards != "none",
                "algorithm.dense_rewards: workers score whole responses; unset it",
            ),
            (
                algorithm.distillation_coef > 0,
                "algorithm.distillation_coef wants a teacher, and no worker has one; unset it",
            ),
            (
                self.critic is not None and self.critic.warmup_steps >= self.trainer.total_steps,
                "critic.warmup_steps leaves no step of trainer.total_steps to the policy",
            ),
        )
        for is_wrong, message in conflicts:
            if is_wrong:
                raise ValueError(message)
        return self
