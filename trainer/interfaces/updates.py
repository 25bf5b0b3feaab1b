"""Optimizer steps over a whole batch."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.api import LossFn, LossWeightFn, MicroBatchSpec, TrainEngine
from trainer.batching.sequences import SequenceBatch


def update(
    engine: TrainEngine,
    parts: Sequence[SequenceBatch],
    mb_spec: MicroBatchSpec,
    loss: LossFn,
    weight: LossWeightFn,
) -> dict[str, float]:
    """One step per part; collective.

    Args:
        parts: this rank's share of each mini-batch.
    Returns:
        The engine's figures, means over the steps.
    """
    figures: dict[str, float] = {}
    for part in parts:
        for name, value in engine.train_batch(part, mb_spec, loss, weight).items():
            figures[name] = figures.get(name, 0.0) + value / len(parts)
    return figures


def loss_tokens(batch: SequenceBatch) -> float:
    """Weight of a micro-batch: its tokens in the loss."""
    return float(batch["loss_mask"].sum())
