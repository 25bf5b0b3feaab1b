"""Train backends by name."""

from __future__ import annotations

from collections.abc import Callable

from headway.contracts.config.experiment import ExperimentConfig
from headway.contracts.config.model import TrainedModelConfig
from headway.contracts.config.optimizer import OptimizerConfig
from headway.contracts.config.workers import WorkersConfig
from headway.contracts.registry import Registry
from trainer.api import TrainEngine
from trainer.topology import Topology
from weight_sync.channel import WeightPublisher

BACKENDS: Registry[Callable[..., TrainEngine]] = Registry(
    "train backend",
    {"fsdp2": "trainer.backends.fsdp2:FSDP2Engine"},
    entry_point_group="headway.train_backends",
)
"""Factories called with (model, optimizer and trainer config, topology, publisher)."""


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
    """
    backend = BACKENDS.get(config.trainer.backend)
    chosen = (model or config.model, optimizer or config.optimizer)
    return backend(*chosen, config.trainer, topology, publisher)
