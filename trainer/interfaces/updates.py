"""Optimizer steps over a whole batch."""

from __future__ import annotations

from trainer.api import LossFn, LossWeightFn, MicroBatchSpec, TrainEngine
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import mini_batches
from trainer.topology import Topology


def update(
    engine: TrainEngine,
    batch: SequenceBatch,
    num_minibatches: int,
    topology: Topology,
    mb_spec: MicroBatchSpec,
    loss: LossFn,
    weight: LossWeightFn,
) -> dict[str, float]:
    """One step per mini-batch of whole groups; collective.

    Args:
        batch: the same on every rank.
    Returns:
        The engine's figures, means over the steps.
    """
    figures: dict[str, float] = {}
    for part in mini_batches(batch, num_minibatches, topology):
        for name, value in engine.train_batch(part, mb_spec, loss, weight).items():
            figures[name] = figures.get(name, 0.0) + value / num_minibatches
    return figures


def loss_tokens(batch: SequenceBatch) -> float:
    """Weight of a micro-batch: its tokens in the loss."""
    return float(batch["loss_mask"].sum())
