"""Trajectories -> packed sequences -> balanced shares of the ranks -> micro-batches by token budget."""

from trainer.batching.balance import partition_by_tokens
from trainer.batching.packing import pack_by_tokens
from trainer.batching.sequences import (
    SequenceBatch,
    batch_of_trajectories,
    first_branches,
    shift_left,
)

__all__ = [
    "SequenceBatch",
    "batch_of_trajectories",
    "first_branches",
    "pack_by_tokens",
    "partition_by_tokens",
    "shift_left",
]
