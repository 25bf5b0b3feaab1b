"""An early stop is decided over all ranks: one that is too far takes the others' gradient along, or is
carried by them."""

from __future__ import annotations

import math

import pytest
import torch

from headway.contracts.config.algorithm import AlgorithmConfig
from tests.numeric.engines import open_engine
from tests.numeric.policies import batch_of
from tests.numeric.ranks import run_ranks
from trainer.algorithms.batch_advantages import compute_advantages
from trainer.algorithms.early_stop import mean_over_ranks
from trainer.api import MicroBatchSpec
from trainer.batching.balance import partition_by_tokens
from trainer.batching.sequences import SequenceBatch, batch_of_trajectories
from trainer.interfaces.ppo_actor import PPOActor
from trainer.topology import Topology

SHIFTS = (0.0, math.log(4.0))
"""Log of the ratio on each rank: 1 and 4."""


def shifted(topology: Topology, folder) -> SequenceBatch:
    """This rank's share, whose behaviour logprobs are so far from the policy's own."""
    config = AlgorithmConfig(decoupled=False)
    rows = [row for row in batch_of(0) if row.num_tokens <= 40]
    batch, _ = compute_advantages(config, batch_of_trajectories(rows), version=0, kl_coef=0.0)
    share = partition_by_tokens(batch.lengths, topology.world_size)[topology.rank]
    mine = batch.select(share)
    alone = open_engine(folder)  # one process: no collective
    own = PPOActor(alone, Topology(0, 1, topology.device), config, MicroBatchSpec(100), 1.0).infer(
        mine
    )
    return mine.with_columns(behaviour_logprobs=own[:, 0] - SHIFTS[topology.rank])


def mean_ratio(topology: Topology, batch: SequenceBatch) -> float:
    """Of all ranks' tokens."""
    count = float(batch["loss_mask"].sum())
    total, tokens = topology.sum([math.exp(SHIFTS[topology.rank]) * count, count])
    return total / tokens


def run_rank(topology: Topology, folder, spec: MicroBatchSpec) -> list[dict[str, float]]:
    """Figures with a bound above the mean over ranks, then with one below it."""
    batch = shifted(topology, folder)
    mean = mean_ratio(topology, batch)
    found = []
    for bound in (mean * 1.01, mean * 0.99):
        config = AlgorithmConfig(decoupled=False, early_stop_ratio=bound)
        engine = open_engine(folder, topology=topology)
        found.append(PPOActor(engine, topology, config, spec, 1.0).train_parts([batch]))
    topology.leave()
    return found


@pytest.mark.extended
def test_ranks_stop_together(tmp_path, llama_dir):
    """With one micro-batch on each rank. Alone, the second one would stop at both bounds and the first at
    none."""
    for goes_on, stops in run_ranks(2, tmp_path, run_rank, llama_dir, MicroBatchSpec(1000)):
        assert goes_on["stopped_fraction"] == 0.0
        assert goes_on["grad_norm"] > 0.0
        assert stops["stopped_fraction"] == 1.0
        assert stops["grad_norm"] == 0.0


def test_a_micro_batch_that_is_repeated_decides_nothing():
    """By hand: a rank with ratio 9 takes part once more, at weight 0."""
    others = torch.tensor([2.0 * 10, 0.5 * 10, 10.0], dtype=torch.float64)
    got = mean_over_ranks(torch.tensor([9.0, 9.0]), torch.tensor(0), lambda mine: mine + others)
    assert got.tolist() == [2.0, 0.5]
    got = mean_over_ranks(torch.tensor([5.0, 2.0]), torch.tensor(20), lambda mine: mine + others)
    assert got.tolist() == pytest.approx([4.0, 1.5])


def count_repeats(topology: Topology, folder) -> list[bool]:
    """Of the micro-batches of a rank with one of its own, beside one with three."""
    engine = open_engine(folder, topology=topology)
    rows = batch_of(0)[: 3 if topology.rank else 1]
    batch = batch_of_trajectories(rows)
    seen: list[bool] = []

    def hook(output, micro_batch):
        seen.append(micro_batch.is_repeat)
        return output.logprobs(micro_batch["labels"])

    engine.forward(batch, MicroBatchSpec(max(batch.lengths), n_mbs=3), post_hook=hook)
    topology.leave()
    return seen


def test_ranks_with_fewer_micro_batches_repeat_one_and_say_so(tmp_path, llama_dir):
    found = run_ranks(2, tmp_path, count_repeats, llama_dir)
    assert found == [[False, True, True], [False, False, False]]
