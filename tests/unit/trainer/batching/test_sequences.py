"""Packed sequences: which token is judged where, and taking sequences out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from headway.contracts.errors import DataError
from trainer.batching.sequences import (
    SequenceBatch,
    batch_of_trajectories,
    first_branches,
    shift_left,
)


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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_selected_sequences_are_those_cut_out_by_hand(lengths, data):
    indices = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=12))
    tokens = torch.arange(sum(lengths))
    chosen = SequenceBatch(tuple(lengths), {"tokens": tokens}).select(indices)
    expected, positions = [], []
    for index in indices:
        start = sum(lengths[:index])
        expected += range(start, start + lengths[index])
        positions += range(lengths[index])
    assert chosen["tokens"].tolist() == expected
    assert chosen.position_ids.tolist() == positions
    assert chosen.position_ids.dtype == torch.int64


def test_taking_all_sequences_in_many_parts_touches_each_once():
    """Cutting the whole batch for every part made it quadratic: seconds at 4096 sequences."""

    class Operations(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += 1
            return func(*args, **(kwargs or {}))

    sequences = SequenceBatch((3,) * 4096, {"tokens": torch.arange(3 * 4096)})
    with Operations() as operations:
        parts = [sequences.select(range(start, start + 32)) for start in range(0, 4096, 32)]
    assert operations.number <= 4096 + 128  # a slice for each sequence, and one to join each part
    assert torch.cat([part["tokens"] for part in parts]).equal(sequences["tokens"])


def test_branches_of_a_sample_count_once(make_trajectory):
    rows = [
        make_trajectory(1, 1, rollout="a"),
        make_trajectory(1, 2, rollout="b"),
        make_trajectory(2, 2, rollout="a"),
    ]
    assert [row.sample_index for row in rows] == [0, 0, 0]
    assert first_branches(rows) == [True, True, False]


def test_what_is_told_of_a_trajectory_is_the_same_all_over_it(make_trajectory):
    rows = [
        make_trajectory(1, 1, rollout="a", reward=0.5),
        make_trajectory(1, 2, rollout="b", reward=2.0, stop="length"),
        make_trajectory(2, 2, rollout="a", reward=0.5),
    ]
    batch = batch_of_trajectories(rows)
    told = {"group": [0, 1, 0], "scores": [0.5, 2.0, 0.5], "truncated": [False, True, False]}
    for name, values in (told | {"is_sample": [True, True, False]}).items():
        assert batch.per_sequence(name).tolist() == values
        pieces = torch.split(batch[name], list(batch.lengths))
        assert all((piece == value).all() for piece, value in zip(pieces, values, strict=True))


def test_with_columns_adds_replaces_and_refuses_other_lengths(batch):
    more = batch.with_columns(new=torch.zeros(6), twice=torch.ones(6))
    assert sorted(more.columns) == ["input_ids", "new", "twice"]
    assert more["twice"].tolist() == [1.0] * 6
    assert batch["twice"].tolist() == [2, 4, 6, 8, 10, 12]
    with pytest.raises(ValueError, match=r"column new is \(5,\), wanted \(6, \.\.\.\)"):
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
            assert batch["action_mask"][at] == row.loss_mask[t + 1]
            assert batch["behaviour_logprobs"][at] == row.logprobs[t + 1]
            assert batch["behaviour_versions"][at] == row.versions[t + 1]
            assert batch["sequence"][at] == index
        last = start + size - 1
        assert not batch["action_mask"][last]
        assert batch["behaviour_logprobs"][last] == 0.0
        assert batch["behaviour_versions"][last] == -1
        start += size
    sampled = sum(int(row.loss_mask.sum()) for row in rows)
    assert int(batch["action_mask"].sum()) == sampled


def test_columns_have_their_types_and_an_empty_batch_is_refused(make_trajectory):
    batch = batch_of_trajectories([make_trajectory()])
    assert {name: column.dtype for name, column in batch.columns.items()} == {
        "input_ids": torch.int64,
        "labels": torch.int64,
        "action_mask": torch.bool,
        "behaviour_logprobs": torch.float32,
        "behaviour_versions": torch.int32,
        "sequence": torch.int64,
        "group": torch.int64,
        "scores": torch.float32,
        "truncated": torch.bool,
        "is_sample": torch.bool,
    }
    with pytest.raises(DataError, match="no trajectories"):
        batch_of_trajectories([])
