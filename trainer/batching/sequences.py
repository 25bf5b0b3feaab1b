"""Trajectories -> packed sequences.

A `SequenceBatch` holds sequences end to end: column `name` is `[T]` over all tokens, split by
`lengths`. Row t of the logits predicts token t + 1, so columns about a sampled token are stored
shifted one to the left (`shift_left`); the last position of a sequence then belongs to no token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from headway.contracts.errors import DataError
from headway.contracts.routed_experts import UNKNOWN
from headway.contracts.types import Trajectory
from trainer.batching.sampling_mask import PackedSamplingMask
from trainer.transfer import to_device


@dataclass(frozen=True, slots=True)
class SequenceBatch:
    """Sequences packed end to end."""

    lengths: tuple[int, ...]
    columns: Mapping[str, Tensor]  # each [T, ...], T = sum(lengths)
    true_positions: Mapping[str, Tensor] = field(default_factory=dict)
    """Positions of the true elements of boolean columns on a GPU, computed by the host before the
    copy.
    """
    is_repeat: bool = False
    """A micro-batch that a rank computes once more, at weight 0: others have more of them."""
    sampling_mask: PackedSamplingMask | None = None
    """Tokens that logprobs and entropies are over, at each position; None: all tokens everywhere."""
    routed_experts: Tensor | None = None
    """[T, L, K] int64 experts that the policy computes each token with, -1 where its routers choose.
    None: they choose everywhere."""

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

    def positions(self, mask: Tensor) -> Tensor:
        """Return [M] int64, where a mask [T] is true. For a mask on a GPU that is no column of this
        batch the host waits."""
        for name, known in self.true_positions.items():
            if self.columns[name] is mask:
                return known
        return mask.nonzero().squeeze(1)

    def per_sequence(self, name: str) -> Tensor:
        """[N] a column that is the same all over each sequence."""
        column = self.columns[name]
        return column[to_device(torch.tensor(self.lengths).cumsum(0) - 1, column.device)]

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
        mask = None if self.sampling_mask is None else self.sampling_mask.spans(spans)
        experts = self.routed_experts
        if experts is not None:
            experts = torch.cat([experts[start:end] for start, end in spans])
        lengths = tuple(self.lengths[i] for i in indices)
        return SequenceBatch(lengths, columns, sampling_mask=mask, routed_experts=experts)

    def with_columns(self, **columns: Tensor) -> SequenceBatch:
        """A batch with more (or replaced) columns [T, ...]."""
        for name, column in columns.items():
            if column.shape[:1] != (self.num_tokens,):
                raise ValueError(
                    f"column {name} is {tuple(column.shape)}, wanted ({self.num_tokens}, ...)"
                )
        known = {name: at for name, at in self.true_positions.items() if name not in columns}
        return replace(self, columns={**self.columns, **columns}, true_positions=known)

    def to(self, device: torch.device) -> SequenceBatch:
        """The batch on another device; to a GPU, without waiting for it."""
        columns = {name: to_device(column, device) for name, column in self.columns.items()}
        known = {
            name: to_device(column.nonzero().squeeze(1), device)
            for name, column in self.columns.items()
            if column.dtype == torch.bool and column.device.type == "cpu" != device.type
        }
        mask = None if self.sampling_mask is None else self.sampling_mask.to(device)
        experts = self.routed_experts
        experts = None if experts is None else to_device(experts, device)
        return replace(
            self,
            columns=columns,
            true_positions=known,
            sampling_mask=mask,
            routed_experts=experts,
        )


def batch_of_trajectories(trajectories: Sequence[Trajectory]) -> SequenceBatch:
    """Pack trajectories.

    Returns:
        Columns `input_ids` int64, and shifted to the token that each position predicts: `labels`
        int64, `action_mask` bool (the policy sampled it), `behaviour_logprobs` float32,
        `behaviour_versions` int32. The same all over each sequence: `sequence` int64, the index of the
        trajectory; `group` int64, that of the first of its prompt group; `scores` float32; `truncated`
        bool, it ran into a limit; `is_sample` bool, false for further branches of a sample. The sampling
        masks and routed experts that trajectories have.
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
        sampling_mask=PackedSamplingMask.of(trajectories),
        routed_experts=packed_experts(trajectories),
    )


def packed_experts(trajectories: Sequence[Trajectory]) -> Tensor | None:
    """Return [T, L, K] int64, the experts of trajectories end to end, -1 where they are unknown.

    Returns:
        None if all are.

    Raises:
        DataError: they are of different models.
    """
    shapes = {row.routed_experts.shape for row in trajectories if row.routed_experts is not None}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise DataError(f"trajectories have routed experts of {len(shapes)} models: {shapes}")
    parts = []
    for row in trajectories:
        whole = np.full((row.num_tokens, *shapes.copy().pop()), UNKNOWN, np.int64)
        if row.routed_experts is not None:
            whole[: len(row.routed_experts)] = row.routed_experts.experts[: row.num_tokens]
        parts.append(whole)
    return torch.from_numpy(np.concatenate(parts))


def with_greedy_samples(batch: SequenceBatch, trajectories: Sequence[Trajectory]) -> SequenceBatch:
    """Add `is_greedy` [T] bool: the trajectory is the first sample of its group.

    Args:
        batch: of these trajectories, in their order.
    """
    flags = torch.tensor([row.sample_index == 0 for row in trajectories])
    return batch.with_columns(is_greedy=flags.repeat_interleave(torch.tensor(batch.lengths)))


def first_branches(trajectories: Sequence[Trajectory]) -> list[bool]:
    """Return for each trajectory whether it is the first of its sample.

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
