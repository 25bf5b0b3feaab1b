"""Experiments on rows: an objective, and the calls that a model which learns it answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import Columns, Figures


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


class SupervisedInterface:
    """A model that learns an objective. Batches are this rank's share, of whole rows: the objective is
    a mean over them, so no rank needs those of others. Every call is collective."""

    def __init__(self, objective: Supervised, engine: TrainEngine, mb_spec: MicroBatchSpec) -> None:
        self.objective = objective
        self.engine = engine
        self.mb_spec = replace(mb_spec, granularity=objective.granularity)

    def inference(self, share: SequenceBatch) -> Columns:
        """What the objective adds to a batch before the update."""
        prepared = self.objective.prepare(share, self.mb_spec)
        return {n: column for n, column in prepared.columns.items() if n not in share.columns}

    def train_step(self, share: SequenceBatch) -> Figures:
        """One optimizer step; figures are means over the rows of all ranks."""
        objective = self.objective
        return self.engine.train_batch(share, self.mb_spec, objective.loss, objective.weight)
