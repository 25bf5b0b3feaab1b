"""Trajectories -> packed sequences.

A `SequenceBatch` holds sequences end to end: column `name` is `[T]` over all tokens, cut by
`lengths`. Row t of the logits predicts token t + 1, so columns that judge a sampled token are stored
shifted one to the left (`shift_left`); the last position of a sequence then judges nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from headway.contracts.errors import DataError
from headway.contracts.types import Trajectory


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Sequences packed end to end."""

    lengths: tuple[int, ...]
    columns: Mapping[str, Tensor]  # each [T], T = sum(lengths)

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @property
    def position_ids(self) -> Tensor:
        """[T] position of each token within its sequence."""
        longest = torch.arange(max(self.lengths))
        return torch.cat([longest[:length] for length in self.lengths])

    def per_sequence(self, name: str) -> Tensor:
        """[N] a column that is the same all over each sequence."""
        return self.columns[name][torch.tensor(self.lengths).cumsum(0) - 1]

    def select(self, indices: Sequence[int]) -> SequenceBatch:
        """The sequences at `indices`, in that order; itself where these are all of them in theirs."""
        if list(indices) == list(range(len(self.lengths))):
            return self
        ends = list(accumulate(self.lengths))
        spans = [(ends[i] - self.lengths[i], ends[i]) for i in indices]
        columns = {
            name: torch.cat([column[start:end] for start, end in spans])
            for name, column in self.columns.items()
        }
        return SequenceBatch(tuple(self.lengths[i] for i in indices), columns)

    def with_columns(self, **columns: Tensor) -> SequenceBatch:
        """A batch with more (or replaced) columns of length T."""
        for name, column in columns.items():
            if column.shape != (self.num_tokens,):
                raise ValueError(
                    f"column {name} is {tuple(column.shape)}, wanted ({self.num_tokens},)"
                )
        return SequenceBatch(self.lengths, {**self.columns, **columns})

    def to(self, device: torch.device) -> SequenceBatch:
        """The batch on another device."""
        return SequenceBatch(
            self.lengths, {name: column.to(device) for name, column in self.columns.items()}
        )


def batch_of_trajectories(trajectories: Sequence[Trajectory]) -> SequenceBatch:
    """Pack trajectories.

    Returns:
        Columns `input_ids` int64, and shifted to the token that each position predicts: `labels`
        int64, `action_mask` bool (the policy sampled it), `behaviour_logprobs` float32,
        `behaviour_versions` int32. The same all over each sequence: `sequence` int64, the index of the
        trajectory; `group` int64, that of the first of its prompt group; `scores` float32; `truncated`
        bool, it ran into a limit; `is_sample` bool, false for further branches of a sample.
    """
    if not trajectories:
        raise DataError("a batch of no trajectories cannot be packed")
    lengths = tuple(trajectory.num_tokens for trajectory in trajectories)

    def column(name: str, dtype: torch.dtype) -> Tensor:
        parts = [getattr(trajectory, name) for trajectory in trajectories]
        return torch.from_numpy(np.concatenate(parts)).to(dtype)

    repeats = torch.tensor(lengths)

    def spread(values: Sequence[float | bool]) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values), repeats, output_size=sum(lengths))

    firsts: dict[str, int] = {}
    groups = [firsts.setdefault(row.rollout_id, at) for at, row in enumerate(trajectories)]
    input_ids = column("input_ids", torch.int64)
    return SequenceBatch(
        lengths,
        {
            "input_ids": input_ids,
            "labels": shift_left(input_ids, lengths, 0),
            "action_mask": shift_left(column("loss_mask", torch.bool), lengths, False),
            "behaviour_logprobs": shift_left(column("logprobs", torch.float32), lengths, 0.0),
            "behaviour_versions": shift_left(column("versions", torch.int32), lengths, -1),
            "sequence": spread(range(len(lengths))),
            "group": spread(groups),
            "scores": spread([row.reward for row in trajectories]),
            "truncated": spread([row.stop_reason == "length" for row in trajectories]),
            "is_sample": spread(first_branches(trajectories)),
        },
    )


def first_branches(trajectories: Sequence[Trajectory]) -> list[bool]:
    """Per trajectory, whether it is the first of its sample.

    A session whose history forked is several trajectories of one sample, all with the sample's reward.
    """
    seen: set[tuple[str, int]] = set()
    are_first = []
    for trajectory in trajectories:
        sample = (trajectory.rollout_id, trajectory.sample_index)
        are_first.append(sample not in seen)
        seen.add(sample)
    return are_first


def shift_left(column: Tensor, lengths: Sequence[int], fill: float) -> Tensor:
    """Move each sequence's values one position to the left; its last position gets `fill`."""
    shifted = column.roll(-1)
    shifted[torch.tensor(lengths).cumsum(0) - 1] = fill
    return shifted
