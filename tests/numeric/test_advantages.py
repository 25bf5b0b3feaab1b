"""Group advantages and reward shaping against slow float64 loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.algorithms.advantages import group_advantages
from trainer.algorithms.rewards import shape_rewards

EPS = 1e-6


def slow_advantages(rewards: list[float], groups: list[int], scale_by_std: bool) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(siblings) / len(siblings)
        variance = math.fsum((r - mean) ** 2 for r in siblings) / len(siblings)
        result.append((reward - mean) / (math.sqrt(variance) + EPS if scale_by_std else 1.0))
    return result


def test_two_groups_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 3.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    got = group_advantages(rewards, groups)
    torch.testing.assert_close(
        got, torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0]), atol=1e-5, rtol=0
    )
    centred = group_advantages(rewards, groups, None)
    torch.testing.assert_close(centred, torch.tensor([0.5, -0.5, -0.5, 0.5, 1.0, -1.0]))


def test_each_sample_counts_once_however_often_it_forked_by_hand():
    # Samples 1, 0 and 0.5, of which the first is three branches: mean 0.5, variance 1/6.
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5])
    counts = torch.tensor([True, False, False, True, True])
    groups = torch.zeros(5, dtype=torch.int64)
    centred = group_advantages(rewards, groups, None, counts=counts)
    assert centred.tolist() == [0.5, 0.5, 0.5, -0.5, 0.0]
    got = group_advantages(rewards, groups, counts=counts)
    high = 0.5 / (math.sqrt(1 / 6) + EPS)
    assert got.tolist() == pytest.approx([high, high, high, -high, 0.0], rel=1e-6)


def test_a_group_of_which_nothing_counts_is_refused():
    groups = torch.tensor([0, 1])
    with pytest.raises(ValueError, match="counts"):
        group_advantages(torch.ones(2), groups, counts=torch.tensor([True, False]))


@pytest.mark.parametrize("scale", ["group", "batch", None])
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.3, 0.0])
def test_equal_rewards_give_exact_zeros(value, scale):
    got = group_advantages(torch.full((7,), value), torch.zeros(7, dtype=torch.int64), scale)
    assert got.tolist() == [0.0] * 7


def test_a_group_of_one_gives_zero():
    assert group_advantages(torch.tensor([3.0]), torch.tensor([9])).tolist() == [0.0]


rows = st.lists(
    st.tuples(st.floats(-20, 20, width=32), st.integers(-3, 3)), min_size=1, max_size=24
)


@settings(max_examples=100, deadline=None)
@given(rows, st.booleans())
def test_groups_of_any_size_and_order_equal_the_slow_loop(rows, scale_by_std):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = group_advantages(
        torch.tensor(rewards), torch.tensor(groups), "group" if scale_by_std else None
    )
    expected = slow_advantages(rewards, groups, scale_by_std)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)


@settings(max_examples=50, deadline=None)
@given(rows, st.randoms(use_true_random=False))
def test_order_of_the_batch_does_not_matter(rows, random):
    rewards = torch.tensor([r for r, _ in rows])
    groups = torch.tensor([g for _, g in rows])
    order = list(range(len(rows)))
    random.shuffle(order)
    straight = group_advantages(rewards, groups)
    torch.testing.assert_close(group_advantages(rewards[order], groups[order]), straight[order])


@pytest.mark.parametrize(
    ("rewards", "groups"),
    [
        (torch.zeros(0), torch.zeros(0, dtype=torch.int64)),
        (torch.zeros(2), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int64)),
        (torch.tensor([1.0, math.nan]), torch.tensor([0, 0])),
        (torch.tensor([1.0, math.inf]), torch.tensor([0, 0])),
    ],
)
def test_wrong_shapes_and_rewards_that_are_not_finite_are_refused(rewards, groups):
    with pytest.raises(ValueError, match=r"wanted|finite"):
        group_advantages(rewards, groups)


def test_rewards_are_biased_then_scaled_then_clipped():
    got = shape_rewards(torch.tensor([0.0, 1.0, 9.0]), bias=-0.5, scaling=10.0, clip=20.0)
    assert got.tolist() == [-5.0, 5.0, 20.0]
    assert shape_rewards(torch.tensor([-9.0]), 0.0, 10.0, 20.0).tolist() == [-20.0]
