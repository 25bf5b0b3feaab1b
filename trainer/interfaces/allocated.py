"""An interface on some of the ranks: these run a call, and all ranks have its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.batching.sequences import SequenceBatch
from trainer.checkpoint import Stateful
from trainer.interfaces.base import Columns, HasState, Metrics
from trainer.topology import Topology


class AllocatedInterface:
    """Forwards calls on the ranks that hold the model; the first of them tells all ranks the result, and
    the numbers that the interface has learned."""

    def __init__(self, interface: Any, everyone: Topology, source: int, is_member: bool) -> None:
        """
        Args:
            interface: on ranks that do not hold the model, one that is never asked.
            everyone: all ranks, with collectives that are this interface's alone.
            source: the rank that tells.
            is_member: True if this rank holds the model.
        """
        self._interface = interface
        self._everyone = everyone
        self._source = source
        self._is_member = is_member

    @property
    def states(self) -> Mapping[str, Stateful]:
        """State of the interface, equal on every rank."""
        return self._interface.states if isinstance(self._interface, HasState) else {}

    def inference(self, batch: SequenceBatch) -> Columns:
        """The interface's columns; collective."""
        columns: Columns = self._shared(lambda: self._interface.inference(batch))
        return columns

    def train_step(self, batch: SequenceBatch) -> Metrics:
        """The interface's metrics; collective."""
        metrics: Metrics = self._shared(lambda: self._interface.train_step(batch))
        return metrics

    def _shared(self, run: Callable[[], Any]) -> Any:
        mine = None
        if self._is_member:
            mine = (run(), {name: part.state_dict() for name, part in self.states.items()})
        result, learned = self._everyone.broadcast(mine, self._source)
        if not self._is_member:
            for name, part in self.states.items():
                part.load_state_dict(learned[name])
        return result
