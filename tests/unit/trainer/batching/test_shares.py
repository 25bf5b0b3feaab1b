"""What a rank does of a whole batch, and how it comes back."""

from __future__ import annotations

import pytest
import torch

from headway.contracts.errors import DataError
from trainer.batching.sequences import SequenceBatch, batch_of_trajectories
from trainer.batching.shares import infer_column, mini_batches
from trainer.topology import Topology

LENGTHS = (5, 2, 7, 1, 3)


class OneOf(Topology):
    """A rank whose peers have said what they say."""

    def gather(self, piece, sizes):
        others = getattr(type(self), "pieces", {})
        others[self.rank] = piece
        type(self).pieces = others
        assert len(piece) == sizes[self.rank]
        return [others.get(rank, torch.zeros(size)) for rank, size in enumerate(sizes)]


def batch() -> SequenceBatch:
    return SequenceBatch(LENGTHS, {"tokens": torch.arange(sum(LENGTHS)).float()})


@pytest.mark.parametrize("world_size", [1, 2, 4, 5])
def test_every_rank_gets_the_whole_column_in_the_order_of_the_batch(world_size):
    class Ranks(OneOf):
        pass

    seen = []
    for rank in range(world_size):
        topology = Ranks(rank, world_size, torch.device("cpu"))
        column = infer_column(
            batch(), topology, lambda share: seen.append(share.lengths) or -share["tokens"]
        )
    assert column.tolist() == (-batch()["tokens"]).tolist()  # of the last, which all went before
    assert sorted(length for lengths in seen for length in lengths) == sorted(LENGTHS)


def test_more_ranks_than_sequences_are_refused():
    with pytest.raises(DataError, match="5 sequences cannot be shared by 6 ranks"):
        infer_column(batch(), OneOf(0, 6, torch.device("cpu")), lambda share: share["tokens"])


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_shares_of_a_mini_batch_are_whole_groups_together(make_trajectory, world_size):
    names = ["a", "b", "a", "c", "b", "a", "d", "d"]
    whole = batch_of_trajectories([make_trajectory(rollout=name) for name in names])
    shares = [
        mini_batches(whole, 2, Topology(rank, world_size, torch.device("cpu")))
        for rank in range(world_size)
    ]
    for number, groups in enumerate([{"a", "c"}, {"b", "d"}]):
        of_ranks = [share[number].per_sequence("sequence").tolist() for share in shares]
        assert all(of_ranks)
        together = sorted(index for of_rank in of_ranks for index in of_rank)
        assert together == [index for index, name in enumerate(names) if name in groups]
