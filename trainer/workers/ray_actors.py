"""Workers as actors of a Ray cluster, one per rank.

An actor that dies ends its group, as a process does (`trainer.workers.processes`). Ray ends actors with
their driver.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from headway.contracts.errors import ConfigError, WorkerLost
from trainer.workers.dispatch import WorkerCall
from trainer.workers.executor import Replies, open_store
from trainer.workers.worker import WorkerHost, WorkerReply, WorkerSpec, describe, rank_environment

_START = "__init__"
POLL_S = 3600.0
"""Ray waits for this long at a time where there is no deadline."""


class RayExecutor:
    """One actor per rank, placed by Ray."""

    def __init__(
        self,
        spec: WorkerSpec,
        world_size: int,
        num_cpus: float = 1.0,
        num_gpus: float | None = None,
        start_timeout_s: float = 120.0,
        timeout_s: float | None = None,
        grace_s: float = 10.0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Start them, and wait until each has built its worker.

        Args:
            num_cpus: reserved per actor.
            num_gpus: the same; None is one where the cluster has GPUs, and else none.
            timeout_s: of every call; None waits as long as all workers live.
            grace_s: for the others, once a worker raised.
            options: further ones of Ray's actors, such as a placement group.
        Raises:
            ConfigError: this process is in no Ray cluster.
            ServiceError: what a worker raised when it was built.
            WorkerLost: a worker died, or was not built in time: the cluster may have too few resources.
        """
        if not ray.is_initialized():
            raise ConfigError("this process is in no Ray cluster; call ray.init() first")
        self._spec = spec
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        address = ray.util.get_node_ip_address()
        self._store = open_store(address)
        if num_gpus is None:
            num_gpus = float(ray.cluster_resources().get("GPU", 0.0) > 0.0)
        resources = {"num_cpus": num_cpus, "num_gpus": num_gpus, **(options or {})}
        actor: Any = ray.remote(**resources)(_Actor)
        self._actors: list[Any] = [actor.remote() for _ in range(world_size)]
        self._is_ended = False
        # Ray shows each actor its own devices only: they all are the first there.
        starts = {
            rank: (spec, rank_environment(rank, 0, world_size, (address, self._store.port)))
            for rank in range(world_size)
        }
        references = {
            self._actors[rank].build.remote(*start): rank for rank, start in starts.items()
        }
        replies = Replies(_START, range(world_size), start_timeout_s, grace_s)
        for rank, reply in sorted(self._collect(references, replies).items()):
            if reply.failure is not None:
                self.close()
                raise reply.failure.error(rank, f"{spec.name}.{_START}")
        self._pids = [int(reply.result) for _, reply in sorted(replies.of.items())]

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return len(self._actors)

    @property
    def pids(self) -> Sequence[int]:
        """Process ids of the workers on their machines, by rank."""
        return self._pids

    def run(self, method: str, calls: Mapping[int, WorkerCall]) -> dict[int, WorkerReply]:
        if self._is_ended:
            raise WorkerLost(
                f"{method} came to a group of {self._spec.name} that was ended; start another one"
            )
        # Equal calls are stored once.
        stored = {id(call): ray.put(call) for call in calls.values()}
        references = {
            self._actors[rank].answer.remote(method, stored[id(call)]): rank
            for rank, call in calls.items()
        }
        replies = Replies(method, list(calls), self._timeout_s, self._grace_s)
        return self._collect(references, replies)

    def close(self) -> None:
        if self._is_ended:
            return
        self._is_ended = True
        leaving = [actor.leave.remote() for actor in self._actors]
        ray.wait(leaving, num_returns=len(leaving), timeout=self._grace_s)
        self._kill()

    def _collect(self, references: Mapping[Any, int], replies: Replies) -> dict[int, WorkerReply]:
        """Collect replies until all have come, or one of the actors has ended."""
        pending = list(references)
        while pending:
            left_s = replies.left_s
            ready, pending = ray.wait(pending, timeout=POLL_S if left_s is None else left_s)
            if not ready and left_s is not None and not replies.left_s:
                self._kill()
                return replies.late()
            for reference in ready:
                rank = references[reference]
                try:
                    replies.add(rank, ray.get(reference, timeout=self._grace_s))
                except (RayActorError, GetTimeoutError) as error:
                    self._kill()
                    ended = replies.lost(f"worker {rank} of {self._spec.name} ended: {error}")
                    raise ended from error
                except RayError as error:  # what it returned cannot be sent, or the call not read
                    replies.add(rank, WorkerReply(failure=describe(error)))
        return replies.of

    def _kill(self) -> None:
        self._is_ended = True
        for actor in self._actors:
            ray.kill(actor)


class _Actor:
    """A worker's process."""

    def build(self, spec: WorkerSpec, environment: Mapping[str, str]) -> WorkerReply:
        try:
            self._host = WorkerHost(spec, environment)
        except Exception as error:  # noqa: BLE001 -- the driver raises it
            return WorkerReply(failure=describe(error))
        return WorkerReply(os.getpid())

    def answer(self, method: str, call: WorkerCall) -> WorkerReply:
        return self._host.answer(method, call)

    def leave(self) -> None:
        self._host.worker.close()
