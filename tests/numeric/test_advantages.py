"""Group advantages and reward shaping against slow float64 loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.numeric.packed import random_batch, segments_of, spans
from trainer.algorithms.advantages import (
    discounted_returns,
    generalized_advantages,
    group_advantages,
)
from trainer.algorithms.segments import Segments

EPS = 1e-6


def slow_advantages(
    rewards: list[float], groups: list[int], scale_by_std: bool, unbiased: bool = True
) -> list[float]:
    result = []
    for reward, group in zip(rewards, groups, strict=True):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean = math.fsum(siblings) / len(siblings)
        divisor = max(1, len(siblings) - 1) if unbiased else len(siblings)
        variance = math.fsum((r - mean) ** 2 for r in siblings) / divisor
        result.append((reward - mean) / (math.sqrt(variance) + EPS if scale_by_std else 1.0))
    return result


def test_two_groups_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 5.0, 3.0])
    groups = torch.tensor([0, 0, 0, 0, 1, 1])
    # Variances 1/4 and 1 of four and two rewards; their estimates are 1/3 and 2.
    got = group_advantages(rewards, groups, unbiased=False)
    torch.testing.assert_close(
        got, torch.tensor([1.0, -1.0, -1.0, 1.0, 1.0, -1.0]), atol=1e-5, rtol=0
    )
    high, low = math.sqrt(3) / 2, 1 / math.sqrt(2)
    torch.testing.assert_close(
        group_advantages(rewards, groups),
        torch.tensor([high, -high, -high, high, low, -low]),
        atol=1e-5,
        rtol=0,
    )
    centred = group_advantages(rewards, groups, None)
    torch.testing.assert_close(centred, torch.tensor([0.5, -0.5, -0.5, 0.5, 1.0, -1.0]))


def test_each_sample_counts_once_however_often_it_forked_by_hand():
    # Samples 1, 0 and 0.5, of which the first is three branches: mean 0.5, variance 1/6, estimate 1/4.
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5])
    counts = torch.tensor([True, False, False, True, True])
    groups = torch.zeros(5, dtype=torch.int64)
    centred = group_advantages(rewards, groups, None, counts=counts)
    assert centred.tolist() == [0.5, 0.5, 0.5, -0.5, 0.0]
    got = group_advantages(rewards, groups, counts=counts)
    high = 0.5 / (0.5 + EPS)
    assert got.tolist() == pytest.approx([high, high, high, -high, 0.0], rel=1e-6)
    of_population = group_advantages(rewards, groups, counts=counts, unbiased=False)
    high = 0.5 / (math.sqrt(1 / 6) + EPS)
    assert of_population.tolist() == pytest.approx([high, high, high, -high, 0.0], rel=1e-6)


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
@given(rows, st.booleans(), st.booleans())
def test_groups_of_any_size_and_order_equal_the_slow_loop(rows, scale_by_std, unbiased):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    scale = "group" if scale_by_std else None
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), scale, unbiased=unbiased)
    expected = slow_advantages(rewards, groups, scale_by_std, unbiased)
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


@settings(max_examples=50, deadline=None)
@given(rows)
def test_leave_one_out_is_the_mean_of_the_siblings(rows):
    rewards, groups = [r for r, _ in rows], [g for _, g in rows]
    got = group_advantages(torch.tensor(rewards), torch.tensor(groups), None, leave_one_out=True)
    for at, (reward, group) in enumerate(rows):
        others = [r for i, (r, g) in enumerate(rows) if g == group and i != at]
        mean = math.fsum(others) / len(others) if others else reward
        assert got[at].item() == pytest.approx(reward - mean, rel=1e-5, abs=1e-5)


def test_leave_one_out_leaves_all_branches_of_a_sample_out():
    # Samples 4, 1 and 1; the first in two branches, each against the mean of the two others.
    rewards = torch.tensor([4.0, 4.0, 1.0, 1.0])
    counts = torch.tensor([True, False, True, True])
    groups = torch.zeros(4, dtype=torch.int64)
    got = group_advantages(rewards, groups, None, leave_one_out=True, counts=counts)
    assert got.tolist() == [3.0, 3.0, -1.5, -1.5]


def test_the_spread_of_the_batch_scales_all_groups_alike():
    rewards = torch.tensor([0.0, 2.0, 10.0, 12.0])
    got = group_advantages(rewards, torch.tensor([0, 0, 1, 1]), "batch")
    one = 1 / (math.sqrt(104 / 3) + EPS)
    assert got.tolist() == pytest.approx([-one, one, -one, one])


def slow_gae(batch, rewards, values, truncated, discount, gae_lambda):
    """From the right, skipping what is no action."""
    advantages, returns = [0.0] * batch.num_tokens, [0.0] * batch.num_tokens
    for number, rows in enumerate(spans(batch.lengths)):
        following = values[rows[-1]] if truncated[number] else 0.0
        last = 0.0
        for t in reversed(rows):
            if not batch["loss_mask"][t]:
                continue
            last = rewards[t] + discount * following - values[t] + discount * gae_lambda * last
            following = values[t]
            advantages[t], returns[t] = last, last + values[t]
    return advantages, returns


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
@pytest.mark.parametrize("lengths", [(7, 1, 4, 9, 2, 6), (70, 33, 1)])
def test_generalized_advantages_equal_the_slow_loop(seed, discount, gae_lambda, lengths):
    batch = random_batch(seed, lengths)
    rewards, values = batch["advantages"], batch["logprobs"]
    truncated = torch.arange(len(lengths)) % 2 == 0
    expected = slow_gae(
        batch, rewards.tolist(), values.tolist(), truncated.tolist(), discount, gae_lambda
    )
    mask = batch["loss_mask"]
    got = generalized_advantages(
        rewards, values, mask, segments_of(batch), truncated, discount, gae_lambda
    )
    for seen, wanted in zip(got, expected, strict=True):
        assert seen.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)
    in_float = generalized_advantages(
        rewards.float(), values.float(), mask, segments_of(batch), truncated, discount, gae_lambda
    )
    assert in_float[0].dtype == torch.float32
    assert in_float[0].tolist() == pytest.approx(expected[0], rel=1e-4, abs=1e-4)


def test_only_a_truncated_sequence_is_bootstrapped_however_long_the_others_are():
    # Two sequences of equal length and equal values; the first ended by itself.
    sequences = Segments.of_lengths([3, 3])
    mask = torch.tensor([True, True, False] * 2)
    rewards, values = torch.zeros(6), torch.tensor([0.0, 0.0, 5.0] * 2)
    truncated = torch.tensor([False, True])
    got, _ = generalized_advantages(rewards, values, mask, sequences, truncated)
    assert got.tolist() == [0.0, 0.0, 0.0, 5.0, 5.0, 0.0]


def test_advantages_of_sequences_do_not_depend_on_how_they_are_packed():
    batch = random_batch(2)
    order = [4, 1, 5, 0, 3, 2]
    truncated = torch.tensor([True, False, True, True, False, False])

    def advantages(packed, flags):
        return generalized_advantages(
            packed["advantages"],
            packed["logprobs"],
            packed["loss_mask"],
            segments_of(packed),
            flags,
            0.9,
            0.7,
        )[0]

    straight = batch.with_columns(result=advantages(batch, truncated))
    packed = straight.select(order)
    torch.testing.assert_close(advantages(packed, truncated[order]), packed["result"])


def test_values_that_nobody_acts_on_may_be_anything():
    batch = random_batch(0)
    mask, ends = batch["loss_mask"], torch.tensor(batch.lengths).cumsum(0) - 1
    is_read = mask.clone()
    is_read[ends] = True
    nobody = torch.zeros(6, dtype=torch.bool)
    values = torch.where(is_read, batch["logprobs"], math.nan)
    got = generalized_advantages(batch["advantages"], values, mask, segments_of(batch), nobody)
    assert all(torch.isfinite(column).all() for column in got)


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_returns_are_advantages_over_a_critic_that_knows_nothing(discount):
    batch = random_batch(1)
    zeros = [0.0] * batch.num_tokens
    expected, _ = slow_gae(batch, batch["advantages"].tolist(), zeros, [False] * 6, discount, 1.0)
    got = discounted_returns(batch["advantages"], batch["loss_mask"], segments_of(batch), discount)
    assert got.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_nothing_in_the_loss_gives_nothing():
    zeros = torch.zeros(3)
    nobody, one = torch.zeros(3, dtype=torch.bool), Segments.of_lengths([3])
    got = generalized_advantages(zeros, zeros, nobody, one, torch.tensor([True]))
    assert [column.tolist() for column in got] == [[0.0] * 3] * 2
