"""Micro-batches: every sequence once, none above the budget, as few as can be."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.contracts.errors import DataError
from trainer.batching.packing import _split, pack_by_tokens

lengths_and_budget = st.lists(st.integers(1, 50), max_size=40).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max([1, *lengths]), 200))
)


@given(lengths_and_budget, st.integers(1, 50))
def test_bins_hold_every_index_once_and_never_exceed_the_budget(case, min_bins):
    lengths, budget = case
    bins = pack_by_tokens(lengths, budget, min_bins)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert all(0 < load <= budget for load in loads)
    assert pack_by_tokens(list(lengths), budget, min_bins) == bins


@given(lengths_and_budget, st.integers(1, 50))
def test_ranks_that_ask_for_the_largest_number_all_get_it(case, min_bins):
    lengths, budget = case
    alone = len(pack_by_tokens(lengths, budget))
    together = len(pack_by_tokens(lengths, budget, min_bins))
    assert together == max(alone, min(min_bins, len(lengths)))


@given(st.lists(st.integers(1, 12), min_size=1, max_size=7), st.integers(12, 30))
def test_few_sequences_need_at_most_one_bin_more_than_the_best(lengths, budget):
    def fits(count):
        return any(
            all(
                sum(n for n, bin_ in zip(lengths, where, strict=True) if bin_ == b) <= budget
                for b in range(count)
            )
            for where in itertools.product(range(count), repeat=len(lengths))
        )

    best = next(count for count in range(1, len(lengths) + 1) if fits(count))
    # Best-fit decreasing is within 11/9 of the best plus 6/9; nothing is worse than it here.
    assert best <= len(pack_by_tokens(lengths, budget)) <= math.floor(11 / 9 * best + 6 / 9)


@pytest.mark.parametrize(
    ("median", "sigma", "budget", "extra"),
    [
        (300, 1.2, 65536, 0),
        (512, 1.0, 32768, 0),
        (512, 1.0, 16384, 0),
        (1024, 1.0, 32768, 0),
        (1024, 1.0, 16384, 1),  # ten to a bin, and seeds that leave it four tokens of room
        (1024, 0.7, 8192, 1),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_thousands_of_lognormal_lengths_fill_the_fewest_bins(median, sigma, budget, extra, seed):
    draws = np.random.default_rng(seed).lognormal(math.log(median), sigma, 4096)
    lengths = np.clip(draws.astype(int), 1, budget).tolist()
    assert len(pack_by_tokens(lengths, budget)) <= -(-sum(lengths) // budget) + extra


def test_bins_are_even_where_the_budget_leaves_room():
    lengths = random.Random(0).choices(range(1, 100), k=200)
    bins = pack_by_tokens(lengths, sum(lengths) // 7 + 60)
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert len(bins) == 7
    assert max(loads) - min(loads) <= 5


def test_bins_by_hand():
    assert pack_by_tokens([3, 9, 4, 6], 10) == [[1], [3], [2, 0]]  # 9, 6, 4 + 3
    assert pack_by_tokens([6, 2, 5, 4, 3], 10) == [[0, 3], [2, 4, 1]]  # evenly: 6 + 3 + 2, too much
    assert pack_by_tokens([5, 5], 10) == [[0, 1]]
    assert pack_by_tokens([5, 5], 10, min_bins=2) == [[0], [1]]
    assert pack_by_tokens([5, 5], 10, min_bins=3) == [[0], [1]]
    assert pack_by_tokens([], 10) == pack_by_tokens([], 10, min_bins=2) == []


@given(lengths_and_budget, st.integers(1, 50), st.integers(1, 4))
def test_neighbours_that_make_a_unit_stay_together_in_their_order(case, min_bins, granularity):
    sizes, budget = case
    # Units of the given sizes, each cut into members: one long and the others of one token.
    units = [[max(size - granularity + 1, 1)] + [1] * (granularity - 1) for size in sizes]
    lengths = [length for unit in units for length in unit]
    budget = max([budget, *map(sum, units)])
    bins = pack_by_tokens(lengths, budget, min_bins, granularity)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    for members in bins:
        assert sum(lengths[index] for index in members) <= budget
        for start in range(0, len(members), granularity):
            first = members[start]
            assert first % granularity == 0
            together = list(range(first, first + granularity))
            assert members[start : start + granularity] == together
    alone = pack_by_tokens([sum(unit) for unit in units], budget, min_bins)
    assert [[i // granularity for i in members[::granularity]] for members in bins] == alone


def test_a_unit_above_the_budget_is_named_with_what_to_do():
    assert pack_by_tokens([3, 9, 4, 6], 12, granularity=2) == [[0, 1], [2, 3]]
    with pytest.raises(
        DataError,
        match=r"sequences 0 to 1, which stay together, have 12 tokens, above the micro-batch budget "
        r"of 11; raise trainer\.max_tokens_per_mb or shorten",
    ):
        pack_by_tokens([3, 9, 4, 6], 11, granularity=2)


def test_a_unit_that_is_not_whole_is_refused():
    with pytest.raises(DataError, match="3 sequences are no whole units of 2"):
        pack_by_tokens([1, 1, 1], 10, granularity=2)


def test_bins_that_cannot_be_made_even_are_halved():
    assert _split([[0, 1, 2, 3, 4], [5]], 4) == [[0, 1], [5], [4, 3], [2]]


def test_a_sequence_above_the_budget_is_named_with_what_to_do():
    with pytest.raises(
        DataError,
        match=r"sequence 1 of 11 tokens .* of 10; raise trainer.max_tokens_per_mb or lower",
    ):
        pack_by_tokens([3, 11, 2], 10)
