"""Optimizer steps over a whole batch."""

from __future__ import annotations

from collections.abc import Sequence

from headway.contracts.config.trainer import TokenNormalizeScope
from trainer.api import LossFn, LossWeightFn, MicroBatchSpec, TrainEngine
from trainer.batching.sequences import SequenceBatch


def update(
    engine: TrainEngine,
    parts: Sequence[SequenceBatch],
    mb_spec: MicroBatchSpec,
    loss: LossFn,
    weight: LossWeightFn,
    scope: TokenNormalizeScope = "global",
) -> dict[str, float]:
    """One step per part; collective.

    Args:
        parts: this rank's share of each mini-batch.
        scope: what the loss is averaged over (`TrainEngine.train_batch`).
    Returns:
        The engine's metrics, means over the steps.
    """
    metrics: dict[str, float] = {}
    for part in parts:
        for name, value in engine.train_batch(part, mb_spec, loss, weight, scope).items():
            metrics[name] = metrics.get(name, 0.0) + value / len(parts)
    return metrics


def loss_tokens(batch: SequenceBatch) -> float:
    """Weight of a micro-batch: its tokens in the loss."""
    return float(batch["loss_mask"].sum())
