"""Configuration models of experiments: those of this distribution, and those of installed packages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from pydantic import create_model

from headway.contracts.config.experiment import (
    DPOExperiment,
    ExperimentConfig,
    GRPOExperiment,
    PPOExperiment,
    RolloutExperiment,
    RWExperiment,
    SFTExperiment,
)
from headway.contracts.config.launch import LaunchConfig
from headway.contracts.config.ppo_code import PPOCodeExperiment, PPOMathExperiment
from headway.contracts.config.ppo_hybrid import PPOHybridExperiment
from headway.contracts.errors import ConfigError
from headway.runtime.config import merge_sources, validate_config

EXPERIMENTS: dict[str, type[ExperimentConfig]] = {
    "grpo": GRPOExperiment,
    "ppo": PPOExperiment,
    "ppo-code": PPOCodeExperiment,
    "ppo-math": PPOMathExperiment,
    "ppo-hybrid": PPOHybridExperiment,
    "sft": SFTExperiment,
    "rw": RWExperiment,
    "dpo": DPOExperiment,
}
"""Experiments of this distribution: known without the trainer's code."""


def experiment_model(kind: str) -> type[ExperimentConfig]:
    """Return the configuration model of an experiment; that of another package is imported.

    Raises:
        UnknownName: nobody registered it.
    """
    if kind in EXPERIMENTS:
        return EXPERIMENTS[kind]
    model: type[ExperimentConfig] = (
        import_module("trainer.experiments.base").EXPERIMENTS.get(kind).config
    )
    return model


def launch_model(tree: Mapping[str, Any]) -> type[LaunchConfig]:
    """Return the configuration model of a run, whose trainer may be another package's experiment.

    Args:
        tree: the settings of the run, not checked.
    Raises:
        UnknownName: nobody registered the experiment.
        ConfigError: it does not learn from rollouts of servers.
    """
    trainer = tree.get("trainer")
    kind = trainer.get("type") if isinstance(trainer, Mapping) else None
    if kind is None:
        return LaunchConfig
    model = experiment_model(str(kind))
    if not issubclass(model, RolloutExperiment):
        raise ConfigError(
            f"trainer.type={kind} does not learn from rollouts of servers, which a run starts; "
            "start it with `headway train`"
        )
    if kind in EXPERIMENTS:
        return LaunchConfig
    return create_model("LaunchConfig", __base__=LaunchConfig, trainer=(model, ...))


def load_run(argv: Sequence[str]) -> LaunchConfig:
    """Read `--config` files and flags of a run.

    Raises:
        ConfigError: every problem, with the nearest right name.
    """
    tree = merge_sources(argv)
    return validate_config(launch_model(tree), tree)
