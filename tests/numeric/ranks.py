"""Run a function as all ranks of a gloo group, each in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import FORKS
from trainer.topology import Topology

DEADLINE_S = 90.0


def run_ranks(
    world_size: int, scratch: Path, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """What `function(topology, *args)` returns on each rank.

    Args:
        scratch: a directory of this run alone.
        function: of a module, as are what it takes and returns.
    """
    processes = start_ranks(world_size, scratch, function, *args)
    deadline = time.monotonic() + DEADLINE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    assert codes == [0] * world_size, f"exit codes {codes}; see the output of the ranks"
    return [torch.load(scratch / str(rank), weights_only=False) for rank in range(world_size)]


def start_ranks(
    world_size: int, scratch: Path, function: Callable[..., Any], *args: Any
) -> list[Any]:
    """The same, still running."""
    scratch.mkdir(parents=True, exist_ok=True)
    processes = [
        FORKS.Process(target=_rank, args=(rank, world_size, scratch, function, args))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return processes


def _rank(
    rank: int, world_size: int, scratch: Path, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = f"file://{scratch / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    topology = Topology(rank, world_size, torch.device("cpu"))
    torch.save(function(topology, *args), scratch / str(rank))
    topology.leave()
