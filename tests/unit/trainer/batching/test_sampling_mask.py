"""Masks follow their sequences: packed, selected, and down to the positions that are asked about."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from headway.contracts.errors import DataError
from headway.contracts.sampling_mask import SamplingMask
from headway.contracts.types import Trajectory, TrajectoryBatch, TrajectoryGroup
from trainer.batching.checks import check_batch
from trainer.batching.sampling_mask import CUT_LOGIT, PackedSamplingMask, cut_tile_
from trainer.batching.sequences import batch_of_trajectories


def row(rollout_id: str, ids: list[int], sets: list[list[int]] | None) -> Trajectory:
    """The first token is the prompt."""
    is_sampled = np.arange(len(ids)) > 0
    mask = None if sets is None else SamplingMask.of([np.array(each, np.int32) for each in sets])
    return Trajectory(
        rollout_id=rollout_id,
        group_id=rollout_id,
        sample_index=0,
        input_ids=np.array(ids, np.int32),
        loss_mask=is_sampled,
        logprobs=np.where(is_sampled, -1.0, 0.0).astype(np.float32),
        versions=np.where(is_sampled, 0, -1).astype(np.int32),
        reward=1.0,
        stop_reason="stop",
        sampling_mask=mask,
    )


A = row("a", [1, 5, 6], [[], [5, 7], [6]])
B = row("b", [2, 8], None)
C = row("c", [3, 9, 4, 4], [[], [0, 9], [], [4, 5]])


def pairs(mask: PackedSamplingMask) -> list[tuple[int, int]]:
    return list(zip(mask.positions.tolist(), mask.tokens.tolist(), strict=True))


def test_a_set_stands_where_its_token_is_predicted():
    batch = batch_of_trajectories([A, B, C])
    mask = batch.sampling_mask
    assert pairs(mask) == [(0, 5), (0, 7), (1, 6), (5, 0), (5, 9), (7, 4), (7, 5)]
    for position in set(mask.positions.tolist()):
        left = {token for at, token in pairs(mask) if at == position}
        assert int(batch["labels"][position]) in left


def test_a_batch_without_masks_has_none():
    assert batch_of_trajectories([B, B]).sampling_mask is None
    whole = replace(B, sampling_mask=SamplingMask.whole(2))
    assert batch_of_trajectories([whole]).sampling_mask is None


@pytest.mark.parametrize("indices", [[0], [2, 0], [1], [2, 1, 0], [0, 1, 2]])
def test_selected_sequences_keep_their_masks(indices):
    rows = [A, B, C]
    selected = batch_of_trajectories(rows).select(indices).sampling_mask
    direct = batch_of_trajectories([rows[i] for i in indices]).sampling_mask
    assert pairs(selected) == ([] if direct is None else pairs(direct))
    assert selected.num_positions == sum(rows[i].num_tokens for i in indices)


def test_new_columns_and_moves_keep_the_mask():
    batch = batch_of_trajectories([A, C])
    changed = batch.with_columns(values=torch.zeros(7)).to(torch.device("cpu"))
    assert pairs(changed.sampling_mask) == pairs(batch.sampling_mask)


def test_rows_are_renumbered():
    mask = batch_of_trajectories([A, B, C]).sampling_mask
    chosen = mask.rows(torch.tensor([1, 2, 5]))
    assert (chosen.num_positions, pairs(chosen)) == (3, [(0, 6), (2, 0), (2, 9)])


def test_logits_of_what_could_not_be_drawn_are_cut_in_their_tile():
    mask = batch_of_trajectories([A, B, C]).sampling_mask
    logits = mask.cut_(torch.zeros(3, 3), slice(0, 3), slice(5, 8))
    assert (logits == CUT_LOGIT).tolist() == [
        [False, True, False],
        [True, False, True],
        [False, False, False],
    ]
    assert (logits[2] == 0.0).all()
    assert (mask.cut_(torch.zeros(1, 2), slice(5, 6), slice(2, 4)) == CUT_LOGIT).all()


def test_pairs_outside_of_a_tile_cut_nothing_in_any_order():
    rows, columns = torch.tensor([2, 0, 9, -1, 0]), torch.tensor([1, 7, 1, 0, -1])
    logits = cut_tile_(torch.zeros(3, 2), rows, columns)
    assert (logits == CUT_LOGIT).tolist() == [[True, True], [False, False], [True, False]]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (row("a", [1, 5, 6], [[], [7], [6]]), "without the token 5 that was drawn at 1"),
        (row("a", [1, 5, 6], [[1], [5], [6]]), "of tokens that the policy was shown"),
        (replace(A, sampling_mask=SamplingMask.whole(2)), "2 positions for 3 tokens"),
    ],
)
def test_a_mask_that_is_not_of_its_tokens_is_refused(wrong, problem):
    batch = TrajectoryBatch((TrajectoryGroup("a", "a", (wrong,)),))
    with pytest.raises(DataError, match=problem):
        check_batch(batch, 0, 1, 0)
