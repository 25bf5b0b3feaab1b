"""Scores of trajectories -> advantages of tokens, as each recipe says."""

from __future__ import annotations

import math

import pytest
import torch

from headway.contracts.config.algorithm import AlgorithmConfig, OverlongConfig
from tests.numeric.packed import actions, random_batch, segments_of
from trainer.algorithms.advantage_registry import RewardedBatch, chosen_estimator
from trainer.algorithms.segments import Segments
from trainer.algorithms.token_advantages import normalized_advantages, trajectory_rewards

SCORES = torch.tensor([1.0, 0.0, 0.5, 1.0, 3.0, 2.0])
GROUPS = torch.tensor([0, 1, 0, 1, 0, 1])
EVERY = torch.ones(6, dtype=torch.bool)


def advantages(options: dict, discount: float) -> torch.Tensor:
    batch = random_batch(0)
    columns = (SCORES, GROUPS, EVERY, ~EVERY, batch["loss_mask"], segments_of(batch))
    config = AlgorithmConfig(advantage=options).advantage
    estimator, args = chosen_estimator(config)
    return estimator.compute(args, RewardedBatch(*columns, discount=discount)).advantages


def per_group(reduce) -> list[float]:
    values, groups = SCORES.tolist(), GROUPS.tolist()
    return [
        reduce(value, [v for v, g in zip(values, groups, strict=True) if g == group])
        for value, group in zip(values, groups, strict=True)
    ]


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: list[float]) -> float:
    return math.sqrt(mean([(v - mean(values)) ** 2 for v in values]))


def unbiased_std(values: list[float]) -> float:
    return std(values) * math.sqrt(len(values) / (len(values) - 1))


def slow_opo(rewards: list[float], groups: list[int]) -> list[float]:
    lengths = [len(rows) for rows in actions(random_batch(0))]
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        inside = [i for i, name in enumerate(groups) if name == group]
        weighted = math.fsum(lengths[i] * rewards[i] for i in inside)
        result.append(reward - weighted / math.fsum(lengths[i] for i in inside))
    return result


def slow_gpg(rewards: list[float], groups: list[int]) -> list[float]:
    result, useful = [], 0
    for reward, group in zip(rewards, groups, strict=True):
        inside = [r for r, name in zip(rewards, groups, strict=True) if name == group]
        useful += len(set(inside)) > 1
        result.append(reward - mean(inside))
    return [value * len(rewards) / max(useful, 1) for value in result]


RECIPES = {
    "grpo": ({}, lambda: per_group(lambda v, g: (v - mean(g)) / (unbiased_std(g) + 1e-6))),
    "grpo_of_population": (
        {"unbiased_std": False},
        lambda: per_group(lambda v, g: (v - mean(g)) / (std(g) + 1e-6)),
    ),
    "dr_grpo": ({"std_level": "none"}, lambda: per_group(lambda v, g: v - mean(g))),
    "rloo": (
        {"leave_one_out": True, "std_level": "none"},
        lambda: per_group(lambda v, g: v - (sum(g) - v) / (len(g) - 1)),
    ),
    "lite_ppo": (
        {"std_level": "batch"},
        lambda: per_group(lambda v, g: (v - mean(g)) / (unbiased_std(SCORES.tolist()) + 1e-6)),
    ),
    "batch_mean": (
        {"mean_level": "batch", "std_level": "batch"},
        lambda: per_group(
            lambda v, g: (v - mean(SCORES.tolist())) / (unbiased_std(SCORES.tolist()) + 1e-6)
        ),
    ),
    "opo": ({"type": "opo"}, lambda: slow_opo(SCORES.tolist(), GROUPS.tolist())),
    "gpg": ({"type": "gpg"}, lambda: slow_gpg(SCORES.tolist(), GROUPS.tolist())),
    "maxrl": ({"type": "maxrl"}, lambda: per_group(lambda v, g: (v - mean(g)) / mean(g))),
    "reinforce": ({"type": "reward"}, SCORES.tolist),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("discount", [1.0, 0.5])
def test_a_recipe_gives_each_action_its_share(recipe, discount):
    options, slow = RECIPES[recipe]
    got = advantages(options, discount)
    for value, rows in zip(slow(), actions(random_batch(0)), strict=True):
        for behind, t in enumerate(reversed(rows)):
            assert got[t].item() == pytest.approx(value * discount**behind, rel=1e-5)


@pytest.mark.parametrize("level", ["batch", "group"])
def test_normalized_advantages_are_whitened_over_the_tokens_in_the_loss(level):
    batch = random_batch(2)
    config = AlgorithmConfig(advantage_norm=level)
    spoilt = torch.where(batch["loss_mask"], batch["advantages"], math.nan)
    got = normalized_advantages(config, spoilt, GROUPS, batch["loss_mask"], segments_of(batch))
    assert not got[~batch["loss_mask"]].any()
    rows = actions(batch)
    for group in [[0, 1, 2, 3, 4, 5]] if level == "batch" else [[0, 2, 4], [1, 3, 5]]:
        inside = [t for number in group for t in rows[number]]
        values = [batch["advantages"][t].item() for t in inside]
        for t, value in zip(inside, values, strict=True):
            expected = (value - mean(values)) / (std(values) + 1e-5)
            assert got[t].item() == pytest.approx(expected, rel=1e-9)


def test_without_a_norm_advantages_stay_as_they_are():
    batch = random_batch(0)
    columns = (batch["advantages"], GROUPS, batch["loss_mask"], segments_of(batch))
    assert normalized_advantages(AlgorithmConfig(), *columns) is batch["advantages"]


def test_a_truncated_answer_loses_a_share_of_what_it_earned_and_gains_nothing():
    config = AlgorithmConfig(truncated_reward_scale=0.25)
    truncated = torch.tensor([True, True, False, False])
    peers = (Segments.whole(truncated), torch.ones(4, dtype=torch.bool))
    scores = torch.tensor([2.0, -2.0, 2.0, -2.0])
    got = trajectory_rewards(config, scores, torch.ones(4), truncated, *peers)
    assert got.tolist() == [0.5, -2.0, 2.0, -2.0]


def test_a_length_penalty_is_taken_off_the_score_before_it_is_shaped():
    config = AlgorithmConfig(length_penalty={"coef": 0.5, "right_above": 0.5}, reward_scaling=10.0)
    num_tokens, nobody = torch.tensor([2, 4, 6]), torch.zeros(3, dtype=torch.bool)
    scores = torch.tensor([1.0, 1.0, 0.0])
    got = trajectory_rewards(config, scores, num_tokens, nobody, Segments.whole(nobody), ~nobody)
    assert got.tolist() == [12.5, 10.0, -2.5]


def test_rewards_are_penalised_then_shaped_then_withheld_from_the_truncated():
    config = AlgorithmConfig(
        overlong=OverlongConfig(max_tokens=10, buffer_tokens=4, factor=2.0),
        reward_bias=-0.5,
        reward_scaling=10.0,
        reward_clip=12.0,
        zero_truncated=True,
    )
    num_tokens = torch.tensor([6, 8, 10, 10])
    truncated = torch.tensor([False, False, False, True])
    peers = (Segments.whole(num_tokens), ~truncated)
    got = trajectory_rewards(config, torch.ones(4), num_tokens, truncated, *peers)
    assert got.tolist() == pytest.approx([5.0, -5.0, -12.0, 0.0])
