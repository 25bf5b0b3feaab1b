"""Checks of a batch before anything learns from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headway.contracts.errors import DataError, RewardError, StaleVersion
from headway.contracts.types import PolicyVersion, Trajectory, TrajectoryBatch, TrajectoryGroup
from weight_sync.checkpoint import ExpertCounts


def check_batch(
    batch: TrajectoryBatch, version: PolicyVersion, group_size: int, max_staleness: int
) -> None:
    """Refuse trajectories that are not whole, finite and fresh enough; the service never sends them.

    Args:
        version: of the weights that will learn from it.
    Raises:
        DataError: a group without all of its samples, a number that is not finite, or a sampling mask
            without a token that was sampled.
        StaleVersion: a token is more than `max_staleness` versions older than `version`.
    """
    for group in batch.groups:
        _check_whole(group, group_size)
        for row in group.trajectories:
            _check_finite(row)
            _check_mask(row)
            _check_fresh(row, version, max_staleness)


def check_experts(batch: TrajectoryBatch, counts: ExpertCounts) -> None:
    """Refuse routed experts of another model.

    Args:
        counts: of the model that learns.
    Raises:
        DataError: it has not so many layers or experts.
    """
    for group in batch.groups:
        for row in group.trajectories:
            if row.routed_experts is None:
                continue
            num_layers, top_k = row.routed_experts.shape
            highest = int(row.routed_experts.experts.max(initial=-1))
            if (
                highest >= counts.num_experts
                or num_layers > counts.num_layers
                or top_k != counts.top_k
            ):
                raise DataError(
                    f"rollout {row.rollout_id}: {row.trajectory_id} was computed by {top_k} experts up "
                    f"to number {highest} in {num_layers} layers, and the model has {counts.top_k} of "
                    f"{counts.num_experts} in {counts.num_layers}: its server serves another model"
                )


def check_verifier(rewards: Sequence[float], lowest: float) -> None:
    """Refuse a batch in which no answer earned anything: the verifier is more likely at fault than they.

    A verifier that fails is another matter: it gives no reward at all (`RewardOutage`).

    Args:
        rewards: of a whole batch, after bias and scaling, not clipped.
        lowest: reward of a wrong answer.
    Raises:
        RewardError: all are the lowest, or lower.
    """
    mean = math.fsum(rewards) / len(rewards)
    if mean < lowest or math.isclose(mean, lowest, rel_tol=1e-6, abs_tol=1e-6):
        raise RewardError(
            f"all {len(rewards)} rewards of the batch are {lowest:g}, that of a wrong answer; see "
            "whether the verifier scores the rows that it is given, and if the task is this hard, set "
            "ppo.check_verifier_status=false"
        )


def _check_whole(group: TrajectoryGroup, group_size: int) -> None:
    samples = {row.sample_index for row in group.trajectories}
    if samples != set(range(group_size)):
        raise DataError(
            f"rollout {group.rollout_id} has samples {sorted(samples)}, wanted are all of "
            f"{group_size}: groups are handed out whole"
        )


def _check_fresh(row: Trajectory, version: PolicyVersion, max_staleness: int) -> None:
    if row.loss_mask.any() and version - row.oldest_version > max_staleness:
        raise StaleVersion(
            f"rollout {row.rollout_id}: {row.trajectory_id} was sampled by version "
            f"{row.oldest_version}, and the weights are version {version}; the service does not keep "
            f"rollout.max_staleness={max_staleness}: see whether another trainer attached to it"
        )


def _check_finite(row: Trajectory) -> None:
    if not np.isfinite(row.reward):
        raise DataError(
            f"rollout {row.rollout_id}: the reward of {row.trajectory_id} is {row.reward}"
        )
    wrong = np.flatnonzero(~np.isfinite(row.logprobs))
    if wrong.size:
        raise DataError(
            f"rollout {row.rollout_id}: the logprob of token {wrong[0]} of {row.trajectory_id} is "
            f"{row.logprobs[wrong[0]]}"
        )


def _check_mask(row: Trajectory) -> None:
    mask = row.sampling_mask
    problem = None if mask is None else mask.problem(row.input_ids)
    if problem is None and mask is not None and mask.counts[~row.loss_mask].any():
        problem = "a sampling mask of tokens that the policy was shown"
    if problem is not None:
        raise DataError(f"rollout {row.rollout_id}: {row.trajectory_id} has {problem}")
