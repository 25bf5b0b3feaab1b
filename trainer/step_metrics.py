"""One step in figures."""

from __future__ import annotations

import time
from itertools import compress

import numpy as np

from headway.contracts.types import TrajectoryBatch
from trainer.batching.sequences import first_branches
from trainer.checkpoint import RunState


def describe_step(state: RunState, batch: TrajectoryBatch) -> dict[str, float]:
    """What was consumed by step `state.step` at version `state.version`.

    Returns:
        `reward` (mean score of the samples), `staleness_max` and `staleness_mean` (versions; per
        trajectory, by its oldest token), `mixed_versions` (share of trajectories sampled by several
        versions), `response_tokens` (mean), `truncated` (share), `trajectories` and `tokens` (counts).
    """
    rows = batch.trajectories
    staleness = [state.version - row.oldest_version for row in rows]
    spans = [np.unique(row.versions[row.loss_mask]).size > 1 for row in rows]
    return {
        "step": state.step,
        "version": state.version,
        "time": time.time(),
        "reward": float(np.mean([row.reward for row in compress(rows, first_branches(rows))])),
        "staleness_max": max(staleness),
        "staleness_mean": float(np.mean(staleness)),
        "mixed_versions": float(np.mean(spans)),
        "response_tokens": float(np.mean([row.loss_mask.sum() for row in rows])),
        "truncated": float(np.mean([row.stop_reason == "length" for row in rows])),
        "trajectories": len(rows),
        "tokens": sum(row.num_tokens for row in rows),
    }
