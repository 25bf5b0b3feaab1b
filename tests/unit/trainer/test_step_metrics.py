"""Metrics of the batch that a step consumed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from headway.contracts.types import TrajectoryBatch, TrajectoryGroup
from trainer.checkpoint import RunState
from trainer.step_metrics import describe_step, token_staleness


def test_staleness_counts_from_the_oldest_token(make_trajectory):
    # Versions are position // 2 from the first sampled token on.
    mixed = make_trajectory(2, 4, reward=1.0)  # versions 1, 1, 2, 2
    pure = make_trajectory(4, 2, sample=1, stop="length")  # versions 2, 2
    batch = TrajectoryBatch((TrajectoryGroup("r0", "g0", (mixed, pure)),))
    metrics = describe_step(RunState("run", step=9, version=4), batch)
    assert metrics["staleness_max"] == 3
    assert metrics["staleness_mean"] == pytest.approx(2.5)
    assert metrics["mixed_versions"] == 0.5
    assert metrics["reward"] == 0.5
    assert metrics["response_tokens"] == 3.0
    assert metrics["truncated"] == 0.5
    assert (metrics["step"], metrics["version"]) == (9, 4)
    assert (metrics["trajectories"], metrics["tokens"]) == (2, 12)


def test_histograms_of_staleness_equal_the_slow_loop(make_trajectory):
    rows = [make_trajectory(2, size, sample=size) for size in (1, 4, 6)]
    unknown = replace(rows[0], versions=np.full_like(rows[0].versions, -1))
    of_tokens, of_trajectories = [0] * 6, [0] * 6
    for row in rows:
        sampled = [int(v) for v, is_in in zip(row.versions, row.loss_mask, strict=True) if is_in]
        of_trajectories[6 - min(sampled)] += 1
        for version in sampled:
            of_tokens[6 - version] += 1
    batch = TrajectoryBatch((TrajectoryGroup("r0", "g0", tuple(rows)),))
    metrics = describe_step(RunState("run", version=6), batch)
    assert metrics["staleness_trajectories"] == of_trajectories
    assert metrics["staleness_tokens"] == of_tokens
    assert sum(of_tokens) == 11
    assert token_staleness([rows[0], unknown], 6).tolist() == [5]


def test_the_reward_of_a_sample_counts_once_however_often_it_forked(make_trajectory):
    first, second = (make_trajectory(2, 4, sample=n, reward=float(n)) for n in range(2))
    fork = replace(second, branch=1)
    batch = TrajectoryBatch((TrajectoryGroup("r0", "g0", (first, second, fork)),))
    metrics = describe_step(RunState("run"), batch)
    assert (metrics["reward"], metrics["trajectories"]) == (0.5, 3)


def test_a_step_moves_all_counters_together():
    state = RunState("run", step=2, version=5, cursor=30, trajectories=64)
    after = RunState("run", step=3, version=6, cursor=34, trajectories=96)
    assert state.after_step(32, cursor=34) == after
