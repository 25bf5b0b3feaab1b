"""Experiments by name: a configuration model, the graph of its calls, and how it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.registry import Registry
from trainer.dataflow.graph import Dataflow


@dataclass(frozen=True, slots=True)
class Experiment:
    """One kind of run."""

    config: type[ExperimentConfig]
    run: Callable[[Any], None]
    flow: Callable[[Any], Dataflow] | None = None
    """The calls of a step, for drawings; None where it is no graph."""


EXPERIMENTS: Registry[Experiment] = Registry(
    "experiment",
    {
        "grpo": "trainer.experiments.policy:GRPO",
        "ppo": "trainer.experiments.policy:PPO",
        "ppo-code": "trainer.experiments.policy:PPO_CODE",
        "ppo-math": "trainer.experiments.policy:PPO_MATH",
        "ppo-hybrid": "trainer.experiments.ppo_hybrid:PPO_HYBRID",
        "sft": "trainer.experiments.sft:SFT_EXPERIMENT",
        "rw": "trainer.experiments.reward_modeling:RW_EXPERIMENT",
        "dpo": "trainer.experiments.dpo:DPO_EXPERIMENT",
    },
    entry_point_group="headway.experiments",
)
