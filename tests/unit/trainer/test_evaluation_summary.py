"""pass@k against all subsets, and metrics of trajectories."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from headway.contracts.errors import StaleVersion
from headway.contracts.types import Trajectory, TrajectoryGroup
from trainer.evaluation.summary import PromptResult, describe, pass_at_k, read_group


@pytest.mark.parametrize("num_passed", [0, 1, 3, 6])
@pytest.mark.parametrize("k", [1, 2, 4, 6])
def test_pass_at_k_is_the_share_of_subsets_with_a_sample_that_passes(k, num_passed):
    samples = [True] * num_passed + [False] * (6 - num_passed)
    subsets = [any(subset) for subset in combinations(samples, k)]
    assert pass_at_k(6, num_passed, k) == pytest.approx(np.mean(subsets), abs=1e-12)


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_wants_at_least_k_samples(k):
    with pytest.raises(ValueError, match=f"pass@{k} of 4 samples"):
        pass_at_k(4, 1, k)


def test_prompts_in_figures():
    prompts = [
        PromptResult([1.0, 0.0, 0.5], [2, 3, 4], [False, False, True]),
        PromptResult([0.0, 0.0, 0.0], [1, 1, 1], [False, False, False]),
    ]
    assert describe(prompts, pass_score=0.5) == {
        "score": pytest.approx(0.25),
        "pass@1": pytest.approx(1 / 3),
        "pass@2": pytest.approx(0.5),
        "pass@3": pytest.approx(0.5),
        "response_tokens": 2.0,
        "truncated": pytest.approx(1 / 6),
        "num_prompts": 2,
        "num_samples": 6,
    }


def test_one_sample_per_prompt_has_no_pass_at_k():
    assert "pass@1" not in describe([PromptResult([1.0], [2], [False])], 1.0)


def row(version: int, sample_index: int = 0, branch: int = 0, reward: float = 1.0) -> Trajectory:
    return Trajectory(
        rollout_id="r",
        group_id="g",
        sample_index=sample_index,
        branch=branch,
        input_ids=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        versions=np.array([-1, 4, version], np.int32),
        reward=reward,
        stop_reason="length",
    )


def test_a_token_of_another_version_is_no_evaluation():
    with pytest.raises(StaleVersion, match=r"versions \[4, 5\], the evaluation is of version 4"):
        read_group(TrajectoryGroup("r", "g", (row(4), row(5, 1))), 4)


def test_the_branches_of_a_sample_count_once():
    group = TrajectoryGroup("r", "g", (row(4), row(4, branch=1), row(4, 1, reward=0.0)))
    assert read_group(group, 4) == PromptResult([1.0, 0.0], [2, 2], [True, True])
