"""Experiments on rows: an objective, and the calls that a model which learns it answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from headway.contracts.config.trainer import TokenNormalizeScope
from trainer.api import LossOutput, MicroBatchSpec, ModelOutput, SaveLoadMeta, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.interfaces.base import Columns, InterfaceContext, Metrics


class Supervised(Protocol):
    """An objective on packed answers."""

    granularity: int
    """Sequences of one row."""

    def prepare(self, batch: SequenceBatch, mb_spec: MicroBatchSpec) -> SequenceBatch:
        """Add what does not depend on the trained weights; once per batch, collective."""

    def loss(self, output: ModelOutput, batch: SequenceBatch) -> LossOutput:
        """Return the loss of a micro-batch of whole rows."""

    def weight(self, batch: SequenceBatch) -> float:
        """Return the weight of a micro-batch's loss."""


class SupervisedInterface:
    """A model that learns an objective. Batches are this rank's share, of whole rows: the objective is
    a mean over them, so no rank needs those of others. Every call is collective."""

    def __init__(
        self,
        objective: Supervised,
        engine: TrainEngine,
        mb_spec: MicroBatchSpec,
        scope: TokenNormalizeScope = "global",
    ) -> None:
        self._objective = objective
        self._engine = engine
        self._mb_spec = replace(mb_spec, granularity=objective.granularity)
        self._scope = scope
        self._held_out: tuple[SequenceBatch, SequenceBatch] | None = None
        """The batch that was evaluated last, and the same prepared."""

    @classmethod
    def of(cls, objective: Supervised, context: InterfaceContext[Any]) -> SupervisedInterface:
        """Build one for the model of a call."""
        return cls(objective, context.model, context.mb_spec, context.token_normalize_scope)

    def inference(self, share: SequenceBatch) -> Columns:
        """Return the columns that the objective adds to a batch before the update."""
        prepared = self._objective.prepare(share, self._mb_spec)
        return {n: column for n, column in prepared.columns.items() if n not in share.columns}

    def train_step(self, share: SequenceBatch) -> Metrics:
        """One optimizer step; metrics are means over the rows of all ranks."""
        loss, weight = self._objective.loss, self._objective.weight
        return self._engine.train_batch(share, self._mb_spec, loss, weight, self._scope)

    def evaluate(self, share: SequenceBatch) -> Metrics:
        """The loss and metrics of rows that are not trained on.

        Args:
            share: columns of the rows. The same batch again is not prepared again.
        """
        if self._held_out is None or self._held_out[0] is not share:
            self._held_out = (share, self._objective.prepare(share, self._mb_spec))
        names: list[str] = []

        def metrics(output: ModelOutput, micro_batch: SequenceBatch) -> LossOutput:
            result = self._objective.loss(output, micro_batch)
            names[:] = ["loss", *result.stats]
            return LossOutput(torch.stack([result.loss, *result.stats.values()]))

        asked = (self._held_out[1], self._mb_spec, metrics, self._objective.weight, self._scope)
        means = self._engine.eval_batch(*asked)
        assert means is not None
        return dict(zip(names, means.tolist(), strict=True))

    def save(self, folder: Path) -> None:
        """Write the model as a Hugging Face directory; collective."""
        self._engine.save(SaveLoadMeta(str(folder), weight_format="hf"))
