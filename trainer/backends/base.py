"""Train backends by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import BaseModel

from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.config.workers import WorkersConfig
from headway.contracts.errors import ConfigError
from headway.contracts.registry import Registry
from headway.runtime.config import validate_config
from trainer.api import TrainEngine
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher

BACKENDS: Registry[Callable[..., TrainEngine]] = Registry(
    "train backend",
    {"fsdp2": "trainer.backends.fsdp2:FSDP2Engine"},
    entry_point_group="headway.train_backends",
)
"""Factories called with (model, optimizer and trainer config, topology, publisher).

One with a pydantic model `Args` is also called with `args`, its instance of `trainer.backend_args`."""


def register_backend(name: str, target: str | Callable[..., TrainEngine]) -> None:
    """Add a train backend: a factory, or `"module:attribute"` for a lazy one."""
    BACKENDS.register(name, target)


def make_engine(
    config: ExperimentConfig | WorkersConfig,
    topology: Topology,
    publisher: WeightPublisher | None,
    model: TrainedModelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
) -> TrainEngine:
    """Build the backend that `trainer.backend` names; it loads nothing before `initialize`.

    Args:
        model, optimizer: of another than the configuration's own.
    Raises:
        ConfigError: `trainer.backend_args` are not those of the backend.
    """
    backend = BACKENDS.get(config.trainer.backend)
    chosen = (model or config.model, optimizer or config.optimizer)
    return backend(
        *chosen, config.trainer, topology, publisher, **_own_args(backend, config.trainer)
    )


def _own_args(backend: Any, config: TrainerConfig) -> dict[str, BaseModel]:
    """Return what a backend with settings of its own is called with besides."""
    model: type[BaseModel] | None = getattr(backend, "Args", None)
    if model is not None:
        return {"args": validate_config(model, config.backend_args, has_flags=False)}
    if config.backend_args:
        raise ConfigError(
            f"trainer.backend_args holds {', '.join(sorted(config.backend_args))}, and the backend "
            f"{config.backend!r} has no settings of its own; leave them out"
        )
    return {}
