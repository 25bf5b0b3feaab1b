"""A train engine on a rank that does not hold its model."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from headway.contracts.types import FinetuneSpec, WeightUpdateMeta
from trainer.api import SaveLoadMeta, Scheduling, TrainEngine
from trainer.backends.state_writer import completed
from trainer.topology import Topology


class AbsentEngine:
    """Does nothing where other ranks do something; a question to the model is an error of the caller."""

    def __init__(self, name: str, topology: Topology) -> None:
        """
        Args:
            name: name of the model.
        """
        self._name = name
        self._topology = topology

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None) -> None:
        """Load nothing."""

    def get_scheduling_config(self) -> Scheduling:
        """Return no more than a process needs."""
        return Scheduling()

    def train_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: other ranks train it."""
        self._refuse()

    def eval_batch(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: other ranks evaluate it."""
        self._refuse()

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: other ranks run it."""
        self._refuse()

    def without_adapters(self) -> AbstractContextManager[None]:
        """Change nothing."""
        return nullcontext()

    def move_towards(self, source: TrainEngine, eta: float) -> None:
        """Move nothing."""

    def upload_weights(self, meta: WeightUpdateMeta | None) -> None:
        """Upload nothing."""

    def step_lr_scheduler(self) -> None:
        """Advance nothing."""

    def save(self, meta: SaveLoadMeta) -> Future[None]:
        """Return the future of nothing."""
        return completed()

    def load(self, meta: SaveLoadMeta) -> None:
        """Load nothing."""

    def destroy(self) -> None:
        """Leave the process group."""
        self._topology.leave()

    def _refuse(self) -> NoReturn:
        raise AssertionError(f"rank {self._topology.rank} does not hold the model {self._name!r}")
