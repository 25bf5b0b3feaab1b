"""Whole policy experiments on tiny models, without a rollout service: their models, and batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.contracts.config.algorithm import AlgorithmConfig
from headway.contracts.config.dataflow import DataflowConfig
from headway.contracts.config.experiment import GRPOExperiment, PPOExperiment
from headway.contracts.types import FinetuneSpec, Trajectory
from tests.numeric.engines import OPTIMIZER
from tests.numeric.models import VOCAB_SIZE
from trainer.dataflow.policy import policy_flow
from trainer.learner import Learner
from trainer.meter import Meter
from trainer.models import PolicyModels
from trainer.topology import Topology

ALONE = Topology(0, 1, torch.device("cpu"))
TEMPERATURE = 0.8
GROUPS = ("a", "a", "a", "b", "b", "c", "c", "c", "c", "d", "d", "d")


def trajectory(seed: int, rollout: str, sample: int) -> Trajectory:
    random = np.random.default_rng(seed)
    num_prompt, size = int(random.integers(1, 5)), int(random.integers(8, 16))
    mask = np.arange(size) >= num_prompt
    return Trajectory(
        rollout_id=rollout,
        group_id="same-prompt",  # two rollouts of one prompt are two groups
        sample_index=sample,
        input_ids=random.integers(0, VOCAB_SIZE, size).astype(np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, -random.uniform(0.5, 4.0, size), 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=float(random.integers(0, 2)) + 0.25 * sample,
        stop_reason="length" if seed % 3 == 0 else "stop",
    )


def batch_of(seed: int) -> list[Trajectory]:
    """Groups of several sizes, every batch with other rewards and tokens."""
    return [trajectory(100 * seed + i, n, GROUPS[:i].count(n)) for i, n in enumerate(GROUPS)]


def experiment(
    folder: Path, kind: str = "ppo", total_steps: int = 10, **sections: Any
) -> PPOExperiment | GRPOExperiment:
    """A configuration whose optimizers are smooth in rounding noise; `sections` replace or add some."""
    optimizer = OPTIMIZER.model_dump()
    tree = {
        "model": {"path": str(folder)},
        "data": {"path": "none", "batch_size": 4},
        "optimizer": optimizer,
        "sampling": {"temperature": TEMPERATURE},
        "rollout": {"reward": {"name": "exact"}},
        "weight_sync": {"root": "none"},
        "trainer": {"total_steps": total_steps, "max_tokens_per_mb": 40},
        "dataflow": {"trace_steps": 0},
    }
    if kind == "ppo":
        sections["critic"] = {"optimizer": optimizer, **sections.get("critic", {})}
        return PPOExperiment.model_validate(tree | sections)
    return GRPOExperiment.model_validate(tree | sections)


def open_models(config: PPOExperiment | GRPOExperiment, topology: Topology = ALONE) -> PolicyModels:
    """Everything that the configuration asks for, loaded."""
    meter = Meter(config.metrics, topology)
    return PolicyModels(config, topology, None, FinetuneSpec(1, 8, 4), meter)


def learner_with(algorithm: AlgorithmConfig, interfaces: Mapping[str, Any]) -> Learner:
    """A policy without a critic, on interfaces by the names of their calls."""
    section = algorithm.model_dump(exclude_unset=True)
    flow = policy_flow(experiment(Path("none"), "grpo", algorithm=section))
    return Learner(flow, interfaces, DataflowConfig(trace_steps=0), ALONE.device)


def train(models: PolicyModels, steps: range) -> list[dict[str, float]]:
    """The figures of each step."""
    metrics = []
    for step in steps:
        metrics.append(models.learner.train_step(batch_of(step), version=step, step=step))
        models.step_lr_schedulers(step)
    return metrics
