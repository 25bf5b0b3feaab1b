"""Shaping, penalties and the place of rewards."""

from __future__ import annotations

import math

import pytest
import torch

from tests.numeric.packed import LENGTHS, actions, random_batch, segments_of, spans
from trainer.algorithms.rewards import (
    best_samples,
    dense_token_rewards,
    length_bonus,
    overlong_penalty,
    shape_rewards,
    token_rewards,
)
from trainer.algorithms.segments import Segments


def test_rewards_are_biased_then_scaled_then_clipped():
    got = shape_rewards(torch.tensor([0.0, 1.0, 9.0]), bias=-0.5, scaling=10.0, clip=20.0)
    assert got.tolist() == [-5.0, 5.0, 20.0]
    assert shape_rewards(torch.tensor([-9.0]), 0.0, 10.0, 20.0).tolist() == [-20.0]


def test_the_overlong_penalty_falls_over_the_buffer_and_no_further():
    lengths = torch.tensor([1, 80, 81, 90, 100, 130])
    got = overlong_penalty(lengths, max_tokens=100, buffer_tokens=20, factor=2.0)
    assert got.tolist() == pytest.approx([0.0, 0.0, -0.1, -1.0, -2.0, -2.0])


@pytest.mark.parametrize("seed", range(4))
def test_the_reward_stands_on_the_last_action_and_the_penalty_on_all(seed):
    batch = random_batch(seed)
    scores = torch.arange(1.0, 7.0)
    kl = batch["logprobs"] - batch["reference_logprobs"]
    expected = [0.0] * batch.num_tokens
    for score, rows in zip(scores.tolist(), actions(batch), strict=True):
        for t in rows:
            expected[t] = -0.3 * kl[t].item()
        if rows:
            expected[rows[-1]] += score
    unmasked = torch.where(batch["loss_mask"], kl, math.nan)
    got = token_rewards(scores, batch["loss_mask"], segments_of(batch), unmasked, 0.3)
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_a_trajectory_that_ends_with_its_environment_is_rewarded_for_its_last_action():
    mask = torch.tensor([False, True, True, False, False])
    got = token_rewards(torch.tensor([2.0]), mask, Segments.of_lengths([5]))
    assert got.tolist() == [0.0, 0.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("delta", [True, False])
def test_dense_rewards_equal_the_slow_loop(delta):
    batch = random_batch(3)
    mask = batch["loss_mask"].clone()
    scores = 4 * batch["advantages"]
    expected = [0.0] * batch.num_tokens
    for rows in spans(LENGTHS):
        mask[rows[-1]] = False  # the last row of a sequence acts on nothing
        for t in rows:
            if mask[t]:
                after = min(max(scores[t + 1].item(), -3.0), 3.0)
                before = min(max(scores[t].item(), -3.0), 3.0)
                expected[t] = after - before if delta else after
    got = dense_token_rewards(scores, mask, clip=3.0, delta=delta)
    assert got.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_length_bonus_falls_from_the_shortest_to_the_longest_of_a_group():
    """Lengths 10, 20, 30 and 40: 0.5 - 0, 1/3, 2/3 and 1; a wrong answer gains nothing. The fifth is a
    further branch, beyond the longest that counts; the last group has one length."""
    lengths = torch.tensor([10, 20, 30, 40, 90, 7, 7])
    is_right = torch.tensor([True, False, True, False, True, True, False])
    counts = torch.tensor([True, True, True, True, False, True, True])
    groups = Segments.of_names(torch.tensor([4, 4, 4, 4, 4, 2, 2]))
    got = length_bonus(lengths, is_right, groups, counts)
    assert got.tolist() == pytest.approx([0.5, 0.0, -1 / 6, -0.5, -0.5, 0.0, 0.0])


def test_of_equal_samples_the_longer_is_kept_and_then_the_earlier():
    scores = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    lengths = torch.tensor([5, 9, 7, 7, 3, 3])
    groups = Segments.of_names(torch.tensor([0, 0, 0, 0, 1, 1]))
    assert best_samples(scores, lengths, groups, keep=2) == [2, 3, 4, 5]
    assert best_samples(scores, lengths, groups, keep=1) == [2, 4]
