"""Train backends by name."""

from __future__ import annotations

from collections.abc import Callable

from headway.contracts.config.experiment import ExperimentConfig
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
    config: ExperimentConfig, topology: Topology, publisher: WeightPublisher | None
) -> TrainEngine:
    """Build the backend that `trainer.backend` names; it loads nothing before `initialize`."""
    backend = BACKENDS.get(config.trainer.backend)
    return backend(config.model, config.optimizer, config.trainer, topology, publisher)
