"""Executors of the calls of a group: processes of this machine, or Ray's actors."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined] # documented, not in __all__

from headway.contracts.errors import WorkerLost
from trainer.workers.dispatch import WorkerCall
from trainer.workers.worker import WorkerReply


class WorkerExecutor(Protocol):
    """Workers in processes of their own; one call at a time."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    @property
    def pids(self) -> Sequence[int]:
        """Their processes."""

    def run(self, method: str, calls: Mapping[int, WorkerCall]) -> dict[int, WorkerReply]:
        """Call a method on the ranks that have a call, and wait for their replies.

        Returns:
            A reply of each; fewer where one failed and others, which may wait for it, did not come back
            in time: the workers are then ended.
        Raises:
            WorkerLost: a worker died or did not answer in time; all of them are ended.
        """

    def close(self) -> None:
        """End the workers; a second time it does nothing."""


class Replies:
    """Replies to one call so far, and the deadline of the others."""

    def __init__(
        self, method: str, ranks: Sequence[int], timeout_s: float | None, grace_s: float
    ) -> None:
        """
        Args:
            grace_s: for the others, once a worker failed.
        """
        self._method = method
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.pending = set(ranks)
        self.of: dict[int, WorkerReply] = {}

    def add(self, rank: int, reply: WorkerReply) -> None:
        """Take the reply of one rank."""
        self.pending.discard(rank)
        self.of[rank] = reply
        if reply.failure is not None:
            grace = time.monotonic() + self._grace_s
            self._deadline = grace if self._deadline is None else min(self._deadline, grace)

    @property
    def has_failure(self) -> bool:
        """True if a worker raised."""
        return any(reply.failure is not None for reply in self.of.values())

    @property
    def left_s(self) -> float | None:
        """Seconds to wait; None has no end."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def late(self) -> dict[int, WorkerReply]:
        """Return the replies after the deadline has passed and the workers were ended.

        Raises:
            WorkerLost: no worker had failed before.
        """
        if self.has_failure:
            return self.of
        ranks = ", ".join(map(str, sorted(self.pending)))
        raise self.lost(
            f"worker {ranks} did not answer {self._method} within {self._timeout_s:g} s"
        )

    def lost(self, reason: str) -> WorkerLost:
        """Return the error to raise once a worker died that had not replied, and the others were ended.

        What these raised is often but that one of them is gone.
        """
        error = WorkerLost(
            f"{reason}; all workers of its group were ended: start another group and load a checkpoint"
        )
        for rank, reply in sorted(self.of.items()):
            if reply.failure is not None:
                error.add_note(f"worker {rank} had raised:\n{reply.failure.where}")
        return error


def open_store(host: str) -> TCPStore:
    """Open the store at which ranks find one another; it listens on this address alone, and lives in
    this process.
    """
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
