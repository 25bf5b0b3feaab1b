"""A batch that every rank has -> each rank's share of it, and back.

A model's columns are computed share by share and then gathered on all ranks: whatever is computed over a
whole batch (advantages, means, thresholds) is the same on every rank, whatever their number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trainer.batching.balance import partition_by_tokens
from trainer.batching.sequences import SequenceBatch
from trainer.topology import Topology


def infer_column(
    batch: SequenceBatch, topology: Topology, infer: Callable[[SequenceBatch], Tensor]
) -> Tensor:
    """[T, ...] of the whole batch, on every rank; collective.

    Args:
        batch: the same on every rank.
        infer: of this rank's share, a row per token, on the CPU.
    Raises:
        DataError: fewer sequences than data-parallel ranks.
    """
    ranks = topology.data_parallel
    shares = partition_by_tokens(batch.lengths, ranks.world_size)
    sizes = [sum(batch.lengths[i] for i in share) for share in shares]
    pieces = ranks.gather(infer(batch.select(shares[ranks.rank])), sizes)
    of_sequence = [torch.empty(0)] * len(batch.lengths)
    for share, piece in zip(shares, pieces, strict=True):
        parts = torch.split(piece, [batch.lengths[i] for i in share])
        for index, part in zip(share, parts, strict=True):
            of_sequence[index] = part
    return torch.cat(of_sequence)


def mini_batches(batch: SequenceBatch, count: int, topology: Topology) -> list[SequenceBatch]:
    """This rank's share of each mini-batch; a mini-batch holds whole groups (column `group`).

    Raises:
        DataError: fewer sequences in a mini-batch than data-parallel ranks.
    """
    groups: dict[int, list[int]] = {}
    for index, group in enumerate(batch.per_sequence("group").tolist()):
        groups.setdefault(group, []).append(index)
    members = list(groups.values())
    parts = []
    for number in range(count):
        indices = [index for group in members[number::count] for index in group]
        lengths = [batch.lengths[index] for index in indices]
        share = own_share(lengths, topology)
        parts.append(batch.select([indices[i] for i in share]))
    return parts


def own_share(lengths: Sequence[int], topology: Topology) -> list[int]:
    """Indices of the sequences in this rank's share of a batch: shares have about equally many tokens.

    Raises:
        DataError: fewer sequences than data-parallel ranks.
    """
    ranks = topology.data_parallel
    return partition_by_tokens(lengths, ranks.world_size)[ranks.rank]
