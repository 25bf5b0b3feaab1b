"""Shares of the ranks: every sequence once, equal costs, groups together."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.contracts.errors import DataError
from trainer.batching.balance import partition_by_tokens


def lognormal(count: int, seed: int = 0, sigma: float = 1.0) -> list[int]:
    draws = np.random.default_rng(seed).lognormal(math.log(1024), sigma, count)
    return np.clip(draws.astype(int), 1, 16384).tolist()


def loads_of(parts: list[list[int]], costs: list[float]) -> list[float]:
    return [sum(costs[index] for index in part) for part in parts]


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=40),
    st.integers(1, 6),
    st.sampled_from([0.0, 0.01]),
    st.booleans(),
)
def test_shares_hold_every_index_once_in_order(lengths, num_parts, attention_weight, equal_counts):
    options = {"attention_weight": attention_weight, "equal_counts": equal_counts}
    if len(lengths) < num_parts:
        with pytest.raises(DataError, match=f"sequences cannot be shared by {num_parts} ranks"):
            partition_by_tokens(lengths, num_parts, **options)
        return
    parts = partition_by_tokens(lengths, num_parts, **options)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in parts)
    assert partition_by_tokens(list(lengths), num_parts, **options) == parts
    counts = [len(part) for part in parts]
    if equal_counts:
        assert max(counts) - min(counts) <= 1
    else:
        costs = [n + attention_weight * n * n for n in lengths]
        loads = loads_of(parts, costs)
        assert max(loads) - min(loads) <= max(costs) * (1 + 1e-12)


@given(st.lists(st.integers(1, 20), min_size=3, max_size=7))
def test_few_sequences_are_shared_within_a_sixth_of_the_best(lengths):
    """Of any number of parts m the bound of largest differencing is 4/3 - 1/3m; of two it is 7/6."""
    best = min(
        max(sum(lengths[i] for i in chosen), sum(lengths) - sum(lengths[i] for i in chosen))
        for count in range(len(lengths) + 1)
        for chosen in itertools.combinations(range(len(lengths)), count)
    )
    assert max(loads_of(partition_by_tokens(lengths, 2), lengths)) * 6 <= best * 7


@pytest.mark.parametrize("attention_weight", [0.0, 1 / (12 * 4096)], ids=["tokens", "attention"])
def test_sixty_four_ranks_with_512_sequences_each_are_level(attention_weight):
    lengths = lognormal(64 * 512)
    parts = partition_by_tokens(lengths, 64, attention_weight=attention_weight)
    loads = loads_of(parts, [n + attention_weight * n * n for n in lengths])
    assert max(loads) <= 1.0001 * sum(loads) / 64


@pytest.mark.parametrize("seed", range(4))
def test_512_sequences_on_64_ranks_cost_hardly_more_than_they_must(seed):
    lengths = lognormal(512, seed, sigma=0.6)
    loads = loads_of(partition_by_tokens(lengths, 64), lengths)
    assert max(loads) <= 1.02 * max(max(lengths), sum(lengths) / 64)


def test_equal_counts_stay_balanced_with_many_sequences():
    lengths = lognormal(4096)
    parts = partition_by_tokens(lengths, 8, equal_counts=True)
    assert {len(part) for part in parts} == {512}
    assert max(loads_of(parts, lengths)) <= 1.001 * sum(lengths) / 8


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from("abcdefgh")), min_size=1, max_size=40)
)
def test_siblings_stay_together_wherever_they_stand(rows):
    lengths, ids = [n for n, _ in rows], [name for _, name in rows]
    num_groups = len(set(ids))
    if num_groups < 3:
        with pytest.raises(DataError, match=f"{num_groups} groups cannot be shared by 3 ranks"):
            partition_by_tokens(lengths, 3, group_ids=ids)
        return
    parts = partition_by_tokens(lengths, 3, group_ids=ids)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    homes = [{ids[index] for index in part} for part in parts]
    assert sum(len(home) for home in homes) == num_groups
    sums = [sum(n for n, name in rows if name == group) for group in set(ids)]
    loads = loads_of(parts, lengths)
    assert max(loads) - min(loads) <= max(sums)


def test_attention_makes_one_long_sequence_worth_many_short_ones():
    lengths = [100] + [10] * 30
    by_tokens = partition_by_tokens(lengths, 2)
    with_attention = partition_by_tokens(lengths, 2, attention_weight=0.01)  # 200 and 11 each
    assert sorted(len(part) for part in by_tokens) == [11, 20]
    assert sorted(len(part) for part in with_attention) == [7, 24]


def test_shares_by_hand():
    assert sorted(partition_by_tokens([5, 1, 1, 1, 1, 1], 2)) == [[0], [1, 2, 3, 4, 5]]
    # Differences 8 - 7 = 1, 6 - 5 = 1, 4 - 1 = 3, 3 - 1 = 2: 16 against 14 (15 each is possible).
    lengths = [8, 7, 6, 5, 4]
    assert sorted(loads_of(partition_by_tokens(lengths, 2), lengths)) == [14, 16]
    assert sorted(partition_by_tokens([4, 4, 4, 4], 4)) == [[0], [1], [2], [3]]


def test_a_missing_group_id_is_refused():
    with pytest.raises(ValueError, match="2 group_ids for 3 sequences"):
        partition_by_tokens([1, 2, 3], 2, group_ids=["a", "b"])
