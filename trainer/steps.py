"""Epochs of a run in steps."""

from __future__ import annotations

from collections.abc import Sized
from typing import TypeVar

from headway.contracts.config.experiment import ExperimentConfig
from headway.runtime.config import validate_config

ConfigT = TypeVar("ConfigT", bound=ExperimentConfig)


def steps_per_epoch(data: Sized, config: ExperimentConfig) -> int:
    """Return the whole batches of a pass over the data, at least 1."""
    return max(1, len(data) // config.data.batch_size)


def with_total_steps(config: ConfigT, data: Sized) -> ConfigT:
    """Return the configuration with the steps that `trainer.total_epochs` asks for.

    Raises:
        ConfigError: it leaves no step to a part of the experiment.
    """
    epochs = config.trainer.total_epochs
    if epochs is None:
        return config
    tree = config.model_dump()
    total_steps = epochs * steps_per_epoch(data, config)
    tree["trainer"] |= {"total_epochs": None, "total_steps": total_steps}
    return validate_config(type(config), tree, has_flags=False)
