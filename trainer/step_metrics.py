"""Metrics of the batch that a step consumed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.contracts.types import PolicyVersion, Trajectory, TrajectoryBatch
from trainer.batching.sequences import first_branches
from trainer.checkpoint import RunState


def describe_step(state: RunState, batch: TrajectoryBatch) -> dict[str, Any]:
    """Return the metrics of the batch that step `state.step` consumed at version `state.version`.

    Returns:
        `reward` (mean score of the samples), `staleness_max` and `staleness_mean` (versions; per
        trajectory, by its oldest token), `staleness_trajectories` and `staleness_tokens` (how many were
        0, 1, 2, … versions old), `mixed_versions` (share of trajectories sampled by several versions),
        `response_tokens` (mean), `truncated` (share), `trajectories` and `tokens` (counts).
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
        "staleness_trajectories": count_each(np.array(staleness)),
        "staleness_tokens": count_each(token_staleness(rows, state.version)),
        "mixed_versions": float(np.mean(spans)),
        "response_tokens": float(np.mean([row.loss_mask.sum() for row in rows])),
        "truncated": float(np.mean([row.stop_reason == "length" for row in rows])),
        "trajectories": len(rows),
        "tokens": sum(row.num_tokens for row in rows),
    }


def token_staleness(rows: Sequence[Trajectory], version: PolicyVersion) -> NDArray[np.int64]:
    """[number of sampled tokens] how many versions old each is at `version`.

    Tokens whose version is not known (below 0) are left out.
    """
    versions = np.concatenate([row.versions[row.loss_mask] for row in rows]).astype(np.int64)
    return version - versions[versions >= 0]


def count_each(values: NDArray[np.int64]) -> list[int]:
    """Count how often 0, 1, 2, … were seen, up to the largest; below 0 counts as 0."""
    counts: list[int] = np.bincount(values.clip(min=0)).tolist()
    return counts
