"""Packing, sharing, shifting: which token is judged where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.contracts.errors import DataError
from trainer.batching import (
    SequenceBatch,
    batch_of_trajectories,
    pack_by_tokens,
    partition_by_tokens,
    shift_left,
)

lengths_and_budget = st.lists(st.integers(1, 50), max_size=40).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.integers(max([1, *lengths]), 200))
)


@given(lengths_and_budget)
def test_bins_hold_every_index_once_and_never_exceed_the_budget(case):
    lengths, budget = case
    bins = pack_by_tokens(lengths, budget)
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert all(0 < load <= budget for load in loads)
    assert sum(load * 2 <= budget for load in loads) <= 1  # two half-empty bins would be one


def test_bins_by_hand():
    assert pack_by_tokens([3, 9, 4, 6], 10) == [[1], [3, 2], [0]]
    assert pack_by_tokens([], 10) == []


def test_a_sequence_above_the_budget_is_named_with_what_to_do():
    with pytest.raises(
        DataError, match=r"sequence of 11 tokens .* of 10; raise .*max_tokens_per_mb"
    ):
        pack_by_tokens([3, 11, 2], 10)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(1, 6))
def test_shares_of_the_ranks_are_balanced(lengths, num_parts):
    if len(lengths) < num_parts:
        with pytest.raises(DataError, match=f"shared by {num_parts} ranks"):
            partition_by_tokens(lengths, num_parts)
        return
    parts = partition_by_tokens(lengths, num_parts)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(part and part == sorted(part) for part in parts)
    loads = [sum(lengths[index] for index in part) for part in parts]
    assert max(loads) - min(loads) <= max(lengths)
    # Longest first is within 4/3 of the best, and the best is at least the mean and the longest.
    assert max(loads) <= 4 / 3 * max(sum(lengths) / num_parts, max(lengths)) + max(lengths) / 3


def test_shares_by_hand():
    assert partition_by_tokens([5, 1, 1, 1, 1, 1], 2) == [[0], [1, 2, 3, 4, 5]]


def test_shift_left_stays_within_each_sequence():
    column = torch.tensor([1, 2, 3, 4, 5, 6])
    assert shift_left(column, (3, 1, 2), 0).tolist() == [2, 3, 0, 0, 6, 0]
    assert column.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.fixture
def batch():
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    return SequenceBatch((3, 1, 2), {"input_ids": ids, "twice": ids * 2})


def test_select_takes_sequences_in_the_asked_order_with_all_columns(batch):
    chosen = batch.select([2, 0])
    assert chosen.lengths == (2, 3)
    assert chosen["input_ids"].tolist() == [5, 6, 1, 2, 3]
    assert chosen["twice"].tolist() == [10, 12, 2, 4, 6]
    assert chosen.num_tokens == 5
    assert chosen.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert batch.select([1, 1])["input_ids"].tolist() == [4, 4]


def test_with_columns_adds_replaces_and_refuses_other_lengths(batch):
    more = batch.with_columns(new=torch.zeros(6), twice=torch.ones(6))
    assert sorted(more.columns) == ["input_ids", "new", "twice"]
    assert more["twice"].tolist() == [1.0] * 6
    assert batch["twice"].tolist() == [2, 4, 6, 8, 10, 12]
    with pytest.raises(ValueError, match=r"column new is \(5,\), wanted \(6,\)"):
        batch.with_columns(new=torch.zeros(5))


def test_position_t_judges_token_t_plus_one(make_trajectory):
    rows = [make_trajectory(2, 3), make_trajectory(1, 2, rollout="r1"), make_trajectory(1, 1)]
    batch = batch_of_trajectories(rows)
    assert batch.lengths == (5, 3, 2)
    start = 0
    for index, row in enumerate(rows):
        size = row.num_tokens
        for t in range(size - 1):
            at = start + t
            assert batch["input_ids"][at] == row.input_ids[t]
            assert batch["labels"][at] == row.input_ids[t + 1]
            assert batch["loss_mask"][at] == row.loss_mask[t + 1]
            assert batch["behaviour_logprobs"][at] == row.logprobs[t + 1]
            assert batch["behaviour_versions"][at] == row.versions[t + 1]
            assert batch["sequence"][at] == index
        last = start + size - 1
        assert not batch["loss_mask"][last]
        assert batch["behaviour_logprobs"][last] == 0.0
        assert batch["behaviour_versions"][last] == -1
        start += size
    sampled = sum(int(row.loss_mask.sum()) for row in rows)
    assert int(batch["loss_mask"].sum()) == sampled


def test_columns_have_their_types_and_an_empty_batch_is_refused(make_trajectory):
    batch = batch_of_trajectories([make_trajectory()])
    assert {name: column.dtype for name, column in batch.columns.items()} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.bool,
        "behaviour_logprobs": torch.float32,
        "behaviour_versions": torch.int32,
        "sequence": torch.int64,
    }
    with pytest.raises(DataError, match="no trajectories"):
        batch_of_trajectories([])
