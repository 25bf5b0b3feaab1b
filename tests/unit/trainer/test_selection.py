"""Which samples of a group are learned from, and what they had earned by each token."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headway.contracts.types import TrajectoryBatch, TrajectoryGroup, Turn
from trainer.algorithms.selection import keep_best
from trainer.batching.running_scores import running_scores


@pytest.fixture
def group(make_trajectory):
    def make(name: str, *samples: tuple[float, int]) -> TrajectoryGroup:
        rows = [
            make_trajectory(num_response=size, rollout=name, sample=i, reward=score)
            for i, (score, size) in enumerate(samples)
        ]
        return TrajectoryGroup(name, f"g-{name}", tuple(rows))

    return make


def names(batch: TrajectoryBatch) -> list[str]:
    return [row.trajectory_id for row in batch.trajectories]


def test_scores_come_first_then_length_then_order(group):
    batch = TrajectoryBatch(
        (group("a", (0, 9), (1, 3), (1, 5), (1, 5)), group("b", (0, 2), (0, 2)))
    )
    assert names(keep_best(batch, 1)) == ["a/2", "b/0"]
    assert names(keep_best(batch, 2)) == ["a/2", "a/3", "b/0", "b/1"]
    assert names(keep_best(batch, 3)) == ["a/1", "a/2", "a/3", "b/0", "b/1"]


def test_other_scores_may_judge(group):
    batch = TrajectoryBatch((group("a", (0, 2), (1, 2)), group("b", (1, 2), (0, 2))))
    assert names(keep_best(batch, 1, scores=[0.5, 0.1, 0.0, 0.3])) == ["a/0", "b/1"]


def test_a_sample_stays_with_all_its_branches(group):
    whole = group("a", (0.0, 3), (1.0, 2))
    first, second = whole.trajectories
    branch = replace(second, branch=1)
    long = replace(first, reward=1.0)
    batch = TrajectoryBatch((replace(whole, trajectories=(long, second, branch)),))
    # The branches of the second are longer together than the first.
    assert names(keep_best(batch, 1)) == ["a/1", "a/1.1"]


def test_an_answer_earns_its_score_with_its_last_sampled_token(make_trajectory):
    row = make_trajectory(num_prompt=2, num_response=3, reward=0.5)
    followed = replace(row, loss_mask=row.loss_mask & (row.input_ids < 14))
    assert running_scores([row, followed]).tolist() == [0, 0, 0, 0, 0.5, 0, 0, 0, 0.5, 0.5]


def test_what_turns_earned_adds_up(make_trajectory):
    turns = (Turn(2, 4, "stop", reward=0.25), Turn(5, 6, "stop"), Turn(6, 8, "stop", reward=-1.0))
    row = replace(make_trajectory(num_prompt=2, num_response=6, reward=9.0), turns=turns)
    assert running_scores([row]).tolist() == [0, 0, 0, 0.25, 0.25, 0.25, 0.25, -0.75]
