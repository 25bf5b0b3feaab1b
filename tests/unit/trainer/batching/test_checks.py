"""A batch that breaks the service's contract is refused before anything learns from it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from headway.contracts.errors import DataError, StaleVersion
from headway.contracts.types import TrajectoryBatch, TrajectoryGroup
from trainer.batching.checks import check_batch


@pytest.fixture
def rows(make_trajectory):
    """Two samples, one in two branches; the versions of their tokens are 1 and 2."""
    first = make_trajectory(2, 3, rollout="r7", sample=0)
    return [first, replace(first, branch=1), make_trajectory(2, 3, rollout="r7", sample=1)]


def check(rows, version=2, max_staleness=1, group_size=2):
    batch = TrajectoryBatch((TrajectoryGroup("r7", "g", tuple(rows)),))
    check_batch(batch, version, group_size, max_staleness)


def test_a_whole_group_passes_however_its_samples_forked(rows):
    check(rows)


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_name(rows, reward):
    with pytest.raises(DataError, match=r"rollout r7: the reward of r7/1 is (nan|inf)"):
        check([*rows[:2], replace(rows[2], reward=reward)])


def test_a_logprob_that_is_not_finite_is_refused_by_name(rows):
    logprobs = np.where(np.arange(5) == 3, -np.inf, 0.0).astype(np.float32)
    with pytest.raises(DataError, match="rollout r7: the logprob of token 3 of r7/0 is -inf"):
        check([replace(rows[0], logprobs=logprobs), *rows[1:]])


def test_a_trajectory_older_than_the_bound_is_refused_by_name(rows):
    with pytest.raises(StaleVersion, match=r"r7/0 was sampled by version 1.*are version 3"):
        check(rows, version=3)


def test_a_trajectory_without_a_sampled_token_has_no_age(rows):
    silent = replace(
        rows[2], loss_mask=np.zeros(5, dtype=np.bool_), versions=np.full(5, -1, dtype=np.int32)
    )
    check([*rows[:2], silent])


@pytest.mark.parametrize("kept", [[0, 1], [2], [0]], ids=str)
def test_a_group_without_all_samples_is_refused(rows, kept):
    with pytest.raises(DataError, match=r"rollout r7 has samples .* wanted are all of 2"):
        check([rows[i] for i in kept])
