"""Metric sinks by name, their protocol, and the description of a run that they get when they open."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.registry import Registry

Metrics = Mapping[str, Any]
"""Metrics of one step: `step`, and names -> a number, None (not known), or a list of counts.

A list counts how often the values 0, 1, 2, … were seen: a histogram of whole numbers.
"""


class Sink(Protocol):
    """Takes one step after the other; what it raises never ends the run."""

    def write(self, metrics: Metrics) -> None:
        """Take a step."""

    def close(self) -> None:
        """Bring what was taken to where it belongs."""


@dataclass(frozen=True, slots=True)
class RunDescription:
    """Description of a run when it begins, or goes on."""

    run_id: str
    """The same for a run and all that resume it."""
    name: str
    folder: Path
    first_step: int
    """The step that is written next; a run that was killed may have written later ones."""
    settings: MetricsConfig
    config: Mapping[str, Any]
    """The resolved one, as JSON."""
    lineage: Mapping[str, Any]


SINKS: Registry[Callable[[RunDescription], Sink]] = Registry(
    "metrics sink",
    {
        "tensorboard": "trainer.tracking.tensorboard:TensorBoardSink",
        "wandb": "trainer.tracking.weights_and_biases:WandbSink",
    },
    entry_point_group="headway.metrics_sinks",
)


def register_sink(name: str, target: str | Callable[[RunDescription], Sink]) -> None:
    """Add a sink: a factory, or `"module:attribute"` for a lazy one."""
    SINKS.register(name, target)
