"""Workers whose ways to fail are known, and a driver that is killed."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from headway.contracts.errors import DataError
from trainer.workers.data_proto import DataProto
from trainer.workers.dispatch import Dispatch, Execute, MeshPlace, mesh_mode, register
from trainer.workers.group import WorkerGroup
from trainer.workers.worker import Worker


class Known(Worker):
    """Does what its methods say."""

    def __init__(self, refused_rank: int | None = None) -> None:
        super().__init__()
        rank = self.topology.rank
        if rank == refused_rank:
            raise DataError(f"rank {rank} is refused")
        self.place_in_mesh("pairs", MeshPlace(rank // 2, rank % 2 == 0))

    @register(Dispatch.ONE_TO_ALL)
    def pid(self) -> int:
        return os.getpid()

    @register(Dispatch.ONE_TO_ALL)
    def visible_devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    @register(Dispatch.ONE_TO_ALL, Execute.RANK_ZERO)
    def rank(self) -> int:
        return self.topology.rank

    @register()
    def scale(self, batch: DataProto, factors: DataProto | None = None) -> DataProto:
        factor = 1 if factors is None else factors["x"]
        return DataProto.of(x=batch["x"] * factor, rank=[self.topology.rank] * len(batch))

    @register(blocking=False)
    def scale_later(self, batch: DataProto) -> DataProto:
        return DataProto.of(x=batch["x"] * 10)

    @register(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def apply(self, function: Callable[[DataProto], DataProto], batch: DataProto) -> DataProto:
        return function(batch)

    @register(mesh_mode("pairs"))
    def seen_by(self, batch: DataProto) -> DataProto:
        return DataProto.of(x=batch["x"], rank=[self.topology.rank] * len(batch))

    @register(Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        self.topology.join()
        return self.topology.sum([float(self.topology.rank)])[0]

    @register(Dispatch.ONE_TO_ALL)
    def wait_for_all(self, but: int | None = None) -> None:
        """In a collective that never ends where one rank hangs."""
        self.topology.join()
        if self.topology.rank == but:
            threading.Event().wait()
        dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def fail(self, rank: int, kind: str) -> None:
        """On one rank; the others wait for it."""
        self.topology.join()
        if self.topology.rank == rank:
            raise DataError("a bad row") if kind == "service" else ValueError("a bad value")
        if kind == "alone":
            dist.barrier()

    @register(Dispatch.ONE_TO_ALL)
    def unfit(self) -> Any:
        return threading.Lock()


def negated(batch: DataProto) -> DataProto:
    return DataProto.of(x=-batch["x"])


def main() -> None:
    """A driver that tells its workers' ids, and waits in a call that never ends."""
    group = WorkerGroup.of_processes(Known, 2)
    sys.stdout.write(" ".join(map(str, group.pids)) + "\n")
    sys.stdout.flush()
    group.wait_for_all(but=1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
