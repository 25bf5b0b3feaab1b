"""A whole run: gateway, generation servers and trainer."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from headway.contracts.config.base import Config
from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.config.gateway import GatewayConfig
from headway.contracts.config.rollout_experiments import PolicyLearner, RolloutExperimentConfig
from headway.contracts.config.scheduling import RunSchedulingConfig
from headway.contracts.config.server import ServerConfig, SGLangConfig, VLLMConfig

SHARED_MEMORY = "/dev/shm"


def shared_root(run_dir: str) -> str:
    """Directory in shared memory that belongs to a run folder on this machine."""
    digest = hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()
    return f"{SHARED_MEMORY}/headway-{digest[:12]}"


class LaunchConfig(Config):
    """The launcher fills in what the processes need to know of one another: URLs, ready files,
    weights, and where tokens come from.

    Versions go through shared memory unless `trainer.weight_sync` names a type or a place; over the
    disk where /dev/shm cannot hold three of them.
    """

    model: str | None = None
    """Model directory of every process that names none of its own."""
    gateway: GatewayConfig
    server: ServerConfig
    trainer: RolloutExperimentConfig
    num_servers: int = Field(1, ge=1, le=64)
    """Generation servers to start."""
    max_servers: int | None = Field(None, ge=1, le=1024)
    """Most generation servers: `headway ray` starts and ends some as the work wants, down to
    `num_servers`. None keeps that number."""
    num_trainer_ranks: int = Field(1, ge=1, le=64)
    """Trainer processes; more than one are started by torchrun."""
    max_restarts: int = Field(3, ge=0)
    """Times that a generation server or the gateway is started again after it died."""
    threads_per_process: int | None = Field(None, ge=1)
    """Computing threads of each server and trainer rank (OMP_NUM_THREADS); None takes the environment's
    OMP_NUM_THREADS, or shares the machine's cores evenly."""
    share_gpus: bool = False
    """Let servers share GPUs with other processes where there are too few; each process then has to
    fit beside the others. Ranks never share. False refuses to start."""
    start_timeout_s: float = Field(300.0, gt=0.0)
    """Seconds until a process must be ready."""
    scheduling: RunSchedulingConfig = RunSchedulingConfig()
    """What `headway slurm` and `headway ray` ask for the gateway and for each server."""

    @model_validator(mode="after")
    def _check_sizes(self) -> LaunchConfig:
        if self.max_servers is not None and self.max_servers < self.num_servers:
            raise ValueError(
                f"max_servers={self.max_servers} is less than num_servers={self.num_servers}, the start"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling_mask(self) -> LaunchConfig:
        backend, trainer = self.server.backend, self.trainer
        has_mask = not isinstance(backend, SGLangConfig | VLLMConfig)
        if has_mask or not trainer.sampling.cuts_distribution:
            return self
        if isinstance(trainer, PolicyLearner) and trainer.algorithm.sampling_mask == "replay":
            raise ValueError(
                f"server.backend.type={backend.type} reports no sampling masks, and trainer.sampling "
                "cuts the distribution (top_k, top_p or min_p); cut nothing, serve with embedded_torch, "
                "or set trainer.algorithm.sampling_mask=ignore, which biases ratios"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _share_memory(cls, tree: Any) -> Any:
        trainer = tree.get("trainer") if isinstance(tree, dict) else None
        if not isinstance(trainer, dict):
            return tree
        given = trainer.get("weight_sync") or {}
        if not isinstance(given, dict) or not given.keys().isdisjoint({"type", "root"}):
            return tree
        run_dir = trainer.get("run_dir") or ExperimentConfig.model_fields["run_dir"].default
        chosen = {"type": "shared_memory", "root": shared_root(str(run_dir)), "keep": 1}
        return {**tree, "trainer": {**trainer, "weight_sync": {**chosen, **given}}}

    @model_validator(mode="before")
    @classmethod
    def _share_model(cls, tree: Any) -> Any:
        if not isinstance(tree, dict) or not isinstance(tree.get("model"), str):
            return tree
        path = {"path": tree["model"]}
        sections = {
            "gateway": {"tokenizer": tree["model"]},
            "server": {"model": path},
            "trainer": {"model": path},
        }
        for name, shared in sections.items():
            section = tree.get(name, {})
            if isinstance(section, dict):
                own = section.get("model", {})
                merged = {**shared, **section}
                if "model" in shared and isinstance(own, dict):
                    merged["model"] = {**path, **own}
                tree = {**tree, name: merged}
        return tree
