"""Ranks wait as long as the settings say, in every group; no two have one GPU; some share sequences."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from headway.contracts.config.metrics import MetricsConfig
from headway.contracts.config.trainer import TrainerConfig
from headway.contracts.errors import ConfigError
from tests.numeric.ranks import run_ranks
from trainer.backends.sharding import Sharding
from trainer.batching.sequences import SequenceBatch
from trainer.batching.shares import infer_column, mini_batches, own_share
from trainer.meter import Meter
from trainer.topology import TIMEOUT_S, Topology, refuse_shared

DEFAULT_S, WORK_S = 3.0, 4.5
CPU = torch.device("cpu")


def timeouts(group: dist.ProcessGroup) -> float:
    """Seconds after which the group gives up."""
    seconds: float = group._get_backend(CPU).options._timeout.total_seconds()
    return seconds


def outlast(topology: Topology, scratch: Path) -> list[float]:
    """Meet again in groups of the settings, where PyTorch's default is a second, and let the others wait
    for rank 0 longer than that."""
    topology.leave()
    constants = dist.distributed_c10d
    constants.default_pg_timeout = timedelta(seconds=DEFAULT_S)
    os.environ |= {
        "RANK": str(topology.rank),
        "WORLD_SIZE": str(topology.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": (scratch / "port").read_text(),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    ours = Topology.from_environment("cpu", waits_s=400.0)
    ours.join()
    apart = ours.apart()
    mesh = Sharding(TrainerConfig(shard_size=2), ours, torch.float32)._mesh()
    groups = [dist.distributed_c10d._get_default_group(), apart.group, *mesh.get_all_groups()]
    for each in (ours, apart):
        if each.is_main:
            assert not threading.Event().wait(WORK_S)  # alone at work
        assert each.broadcast_bytes(b"batch" if each.is_main else None) == b"batch"
    return [timeouts(group) for group in groups]


def test_ranks_wait_for_the_first_one_as_long_as_the_settings_do(tmp_path: Path) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (tmp_path / "port").write_text(str(store.port))
    for seen in run_ranks(4, tmp_path / "ranks", outlast, tmp_path):
        assert seen == [TIMEOUT_S + 400.0] * 4


def test_ranks_on_one_gpu_are_refused_by_number() -> None:
    refuse_shared(["GPU-a", "GPU-b", "GPU-c"])
    with pytest.raises(ConfigError, match=r"ranks 1 and 3 have the same GPU \(GPU-b\)"):
        refuse_shared(["GPU-a", "GPU-b", "GPU-c", "GPU-b"])


def test_a_meter_begins_before_anything_was_computed_on_the_gpu() -> None:
    assert not torch.cuda.is_initialized()
    Meter(MetricsConfig(peak_tflops=989.4), Topology(0, 1, torch.device("cuda", 0)))


LENGTHS = (5, 2, 7, 1, 3, 4)


def halves_of_two_models(topology: Topology) -> tuple[list[int], list[int], list[float], float]:
    """Ranks 0 and 1 hold one copy of a model, ranks 2 and 3 the other."""
    ranks = topology.with_data_parallel_ranks([0, 0, 1, 1]).apart()
    tokens = torch.arange(sum(LENGTHS)).float()
    groups = {"group": torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))}
    batch = SequenceBatch(LENGTHS, {"tokens": tokens, **groups})
    mine = own_share(LENGTHS, ranks)
    (mini,) = mini_batches(batch, 1, ranks)
    column = infer_column(batch, ranks, lambda share: -share["tokens"])
    (total,) = ranks.data_parallel.sum([float(mini.num_tokens)])
    return mine, list(mini.lengths), column.tolist(), total


def test_ranks_that_hold_parts_of_one_model_get_the_same_share_and_count_once(
    tmp_path: Path,
) -> None:
    seen = run_ranks(4, tmp_path, halves_of_two_models)
    shares = [mine for mine, *_ in seen]
    assert shares[0] == shares[1] != shares[2] == shares[3]
    assert sorted(shares[0] + shares[2]) == list(range(len(LENGTHS)))
    for mine, lengths, column, total in seen:
        assert lengths == [LENGTHS[index] for index in mine]
        assert column == [-float(place) for place in range(sum(LENGTHS))]
        assert total == sum(LENGTHS)


@pytest.mark.parametrize("ranks", [[], [0], [0, 0, 1], [1, 1], [0, 0, 1, 1]])
def test_shares_that_are_not_those_of_all_ranks_are_refused(ranks: list[int]) -> None:
    with pytest.raises(ConfigError, match="do not give 2 ranks equal shares"):
        Topology(0, 2, CPU).with_data_parallel_ranks(ranks)


def test_fsdp_wants_a_share_for_each_rank() -> None:
    shared = Topology(0, 2, CPU, data_parallel_ranks=(0, 0))
    with pytest.raises(ConfigError, match="2 ranks have 1 shares of a batch; FSDP2 wants one"):
        Sharding(TrainerConfig(), shared, torch.float32)
