"""OPO, GPG and MaxRL by hand, and with branches of one sample."""

from __future__ import annotations

import pytest
import torch

from trainer.algorithms.group_baselines import (
    gpg_advantages,
    maxrl_advantages,
    opo_advantages,
    remax_advantages,
)

GROUPS = torch.tensor([3, 3, 3, 8, 8])
EVERY = torch.ones(5, dtype=torch.bool)


def test_opo_weighs_by_length():
    """(2·1 + 6·0 + 2·1) / 10 = 0.4, and (1·0 + 3·1) / 4 = 0.75."""
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0])
    got = opo_advantages(rewards, GROUPS, torch.tensor([2, 6, 2, 1, 3]), EVERY)
    assert got.tolist() == pytest.approx([0.6, -0.4, 0.6, -0.75, 0.25])


def test_opo_of_equal_lengths_is_the_mean_and_of_no_tokens_the_reward():
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 4.0])
    got = opo_advantages(rewards, GROUPS, torch.tensor([4, 4, 4, 0, 0]), EVERY)
    assert got.tolist() == pytest.approx([0.5, -0.5, 0.0, 2.0, 4.0])


def test_gpg_makes_up_for_groups_without_a_gradient():
    """Three of five samples are in a group whose rewards differ: centred rewards times 5/3."""
    rewards = torch.tensor([1.0, 0.0, 0.5, 2.0, 2.0])
    got = gpg_advantages(rewards, GROUPS, EVERY)
    assert got.tolist() == pytest.approx([0.5 * 5 / 3, -0.5 * 5 / 3, 0.0, 0.0, 0.0])
    assert gpg_advantages(torch.full((5,), 0.1), GROUPS, EVERY).tolist() == [0.0] * 5


def test_maxrl_counts_what_few_solve_for_more():
    """One of three is solved: (1 - 1/3) / (1/3) = 2. None of two: nothing."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    got = maxrl_advantages(rewards, GROUPS, EVERY)
    assert got.tolist() == pytest.approx([2.0, -1.0, -1.0, 0.0, 0.0])


def test_maxrl_refuses_a_negative_reward():
    with pytest.raises(ValueError, match=r"one is -1\.0; rewards of 0 and above are wanted"):
        maxrl_advantages(torch.tensor([1.0, -1.0, 0.0, 0.0, 0.0]), GROUPS, EVERY)


def test_further_branches_of_a_sample_get_its_advantage_and_change_no_baseline():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0])
    counts = torch.tensor([True, True, False, True, True])
    sizes = torch.tensor([2, 2, 50, 1, 1])
    opo = opo_advantages(rewards, GROUPS, sizes, counts)
    assert opo.tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5, -0.5])
    maxrl = maxrl_advantages(rewards, GROUPS, counts)
    assert maxrl.tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0, -1.0])
    assert gpg_advantages(rewards, GROUPS, counts).tolist() == pytest.approx(opo.tolist())


def test_remax_takes_off_the_reward_of_the_greedy_sample():
    rewards = torch.tensor([0.5, 1.0, 0.0, 2.0, 3.0])
    is_greedy = torch.tensor([True, False, False, False, True])
    got = remax_advantages(rewards, GROUPS, is_greedy)
    assert got.tolist() == pytest.approx([0.0, 0.5, -0.5, -1.0, 0.0])
    with pytest.raises(ValueError, match="of a group's greedy sample, and a group has none"):
        remax_advantages(rewards, GROUPS, EVERY & (GROUPS == 3))
