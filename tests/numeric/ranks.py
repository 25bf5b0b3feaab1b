"""Run a function as all ranks of a gloo group, each in a process of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from multiprocessing.connection import wait
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

    A group that does not come about is formed once more: Gloo takes any process that connects to its port
    and names the right number for a rank, also a process of a killed group whose port it was before.

    Args:
        scratch: a directory of this run alone.
        function: of a module, as are what it takes and returns.
    """
    codes = _run(world_size, scratch, function, *args)
    if any(codes) and not all((scratch / f"{rank}-joined").exists() for rank in range(world_size)):
        scratch = scratch / "again"
        codes = _run(world_size, scratch, function, *args)
    assert codes == [0] * world_size, f"exit codes {codes}; see the output of the ranks"
    return [torch.load(scratch / str(rank), weights_only=False) for rank in range(world_size)]


def _run(
    world_size: int, scratch: Path, function: Callable[..., Any], *args: Any
) -> list[int | None]:
    """Exit codes; None of a rank that was still running when another one failed or the time was over."""
    processes = start_ranks(world_size, scratch, function, *args)
    deadline = time.monotonic() + DEADLINE_S
    running = {process.sentinel for process in processes}
    while running and not any(process.exitcode for process in processes):
        ended = wait([*running], max(0.0, deadline - time.monotonic()))
        if not ended:
            break
        running -= {*ended}
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


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
    (scratch / f"{rank}-joined").touch()
    topology = Topology(rank, world_size, torch.device("cpu"))
    torch.save(function(topology, *args), scratch / str(rank))
    topology.leave()
