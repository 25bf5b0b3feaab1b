"""Several workers in one process per rank, each called through a group of its own.

    executor = ProcessExecutor(WorkerSpec(FusedWorker, ({"actor": ..., "critic": ...},)), 2)
    groups = fused_groups(executor, specs)     groups["critic"].compute_values(batch)

They share devices, so one of them computes at a time, on all ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.workers.dispatch import WorkerCall
from trainer.workers.executor import WorkerExecutor
from trainer.workers.group import WorkerGroup
from trainer.workers.worker import WorkerReply, WorkerSpec


class FusedWorker:
    """Workers by name; a method `name.method` is that worker's."""

    def __init__(self, specs: Mapping[str, WorkerSpec]) -> None:
        self._workers = {name: spec.build() for name, spec in specs.items()}

    def __getattr__(self, name: str) -> Any:
        worker, _, method = name.partition(".")
        return getattr(self._workers[worker], method)

    def close(self) -> None:
        """Close all; the last call."""
        for worker in self._workers.values():
            worker.close()


class FusedExecutor:
    """`WorkerExecutor` of one of several workers in shared processes."""

    def __init__(
        self, executor: WorkerExecutor, name: str, lock: threading.Lock, users: set[str]
    ) -> None:
        """
        Args:
            lock: of the processes: each rank runs the calls of all its workers in one order.
            users: names of the workers whose groups are open; the last one ends the processes.
        """
        self._executor = executor
        self._name = name
        self._lock = lock
        self._users = users
        users.add(name)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._executor.world_size

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the workers, by rank."""
        return self._executor.pids

    def run(self, method: str, calls: Mapping[int, WorkerCall]) -> dict[int, WorkerReply]:
        with self._lock:
            return self._executor.run(f"{self._name}.{method}", calls)

    def close(self) -> None:
        self._users.discard(self._name)
        if not self._users:
            self._executor.close()


def fused_groups(
    executor: WorkerExecutor, specs: Mapping[str, WorkerSpec], auto_pad: bool = True
) -> dict[str, WorkerGroup]:
    """Return a group for each worker of a `FusedWorker`; the last one that is closed ends the processes.

    Args:
        executor: of a `FusedWorker` with these specs.
    """
    lock, users = threading.Lock(), set[str]()
    return {
        name: WorkerGroup(spec.worker, FusedExecutor(executor, name, lock, users), auto_pad)
        for name, spec in specs.items()
    }
