"""Selection of the samples of a prompt that are learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from headway.contracts.types import TrajectoryBatch, TrajectoryGroup
from trainer.algorithms.rewards import best_samples
from trainer.algorithms.segments import Segments


def keep_best(
    batch: TrajectoryBatch, keep: int, scores: Sequence[float] | None = None
) -> TrajectoryBatch:
    """Best of n: keep each group's samples of highest score, the longer among equals, then the earlier.

    (AReaL scores them with a verifier of math, whatever the task; here it is the experiment's own.)

    Args:
        batch: whole groups.
        keep: samples per group; a sample stays with all of its branches.
        scores: of each trajectory; None takes those of the rollouts.
    Returns:
        All groups, each with the samples that are kept, in their order.
    """
    groups, start = [], 0
    for group in batch.groups:
        end = start + len(group.trajectories)
        own = [row.reward for row in group.trajectories] if scores is None else scores[start:end]
        groups.append(_best_of(group, keep, own))
        start = end
    return TrajectoryBatch(tuple(groups))


def _best_of(group: TrajectoryGroup, keep: int, scores: Sequence[float]) -> TrajectoryGroup:
    score_of: dict[int, float] = {}
    tokens: dict[int, int] = {}
    for row, score in zip(group.trajectories, scores, strict=True):
        name = row.sample_index
        score_of.setdefault(name, score)  # branches share it
        tokens[name] = tokens.get(name, 0) + int(row.loss_mask.sum())
    names = list(score_of)
    best = best_samples(
        torch.tensor(list(score_of.values()), dtype=torch.float64),
        torch.tensor(list(tokens.values())),
        Segments.whole(torch.empty(len(names))),
        keep,
    )
    kept = {names[index] for index in best}
    rows = tuple(row for row in group.trajectories if row.sample_index in kept)
    return replace(group, trajectories=rows)
