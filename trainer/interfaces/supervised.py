"""What the loop of supervised experiments asks of an interface."""

from __future__ import annotations

from typing import Protocol

from trainer.api import LossOutput, MicroBatchSpec, ModelOutput
from trainer.batching.sequences import SequenceBatch


class Supervised(Protocol):
    """An objective on packed answers."""

    granularity: int
    """Sequences of one row."""

    def prepare(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> SequenceBatch:
        """With what does not depend on the weights that are trained; once per batch, collective."""

    def loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        """Of a micro-batch of whole rows."""

    def weight(self, batch: SequenceBatch) -> float:
        """What the loss of a micro-batch counts."""
