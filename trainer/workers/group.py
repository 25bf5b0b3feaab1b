"""A group of workers that is called like one object.

    group.compute_log_prob(batch)     dispatch -> run on all ranks -> collect

Calls of one group run one after the other, in the order in which they were made; those of several groups
run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, cast

from headway.contracts.errors import ConfigError
from trainer.workers.dispatch import (
    Dispatched,
    Execute,
    MeshPlace,
    RegisteredMethod,
    WorkerCall,
    mode_of,
    registered_methods,
)
from trainer.workers.executor import WorkerExecutor
from trainer.workers.processes import ProcessExecutor
from trainer.workers.worker import MESH_PLACE, Worker, WorkerSpec


class WorkerGroup:
    """The registered methods of a worker's class, as methods of the driver.

    An argument that is a future is waited for; a method that does not block returns one.
    """

    def __init__(
        self, worker: type[Worker], executor: WorkerExecutor, auto_pad: bool = True
    ) -> None:
        """
        Args:
            executor: of workers of that class; the group ends it.
            auto_pad: fill rows up with copies where they cannot be split equally; False refuses them.
        Raises:
            ConfigError: a method is called like something of the group itself.
        """
        self._methods = registered_methods(worker)
        taken = sorted(name for name in self._methods if hasattr(WorkerGroup, name))
        if taken:
            raise ConfigError(
                f"{worker.__name__} registers {', '.join(taken)}, which a group has itself; rename it"
            )
        self._executor = executor
        self._auto_pad = auto_pad
        self._meshes: dict[str, Sequence[MeshPlace]] = {}
        self._thread = ThreadPoolExecutor(1, f"{worker.__name__}-group")

    @staticmethod
    def of_processes(
        worker: type[Worker],
        world_size: int,
        *args: Any,
        auto_pad: bool = True,
        **options: Any,
    ) -> WorkerGroup:
        """Processes of this machine.

        Args:
            args: of the worker's class.
            options: of `ProcessExecutor`.
        """
        executor = ProcessExecutor(WorkerSpec(worker, args), world_size, **options)
        return WorkerGroup(worker, executor, auto_pad)

    @staticmethod
    def of_ray_actors(
        worker: type[Worker],
        world_size: int,
        *args: Any,
        auto_pad: bool = True,
        **options: Any,
    ) -> WorkerGroup:
        """Actors of a Ray cluster.

        Args:
            args: of the worker's class.
            options: of `RayExecutor`.
        Raises:
            ConfigError: Ray is not installed.
        """
        try:
            from trainer.workers.ray_actors import RayExecutor  # an extra
        except ImportError as error:
            raise ConfigError(
                "Ray is not installed; install Headway with the extra 'ray'"
            ) from error
        executor = RayExecutor(WorkerSpec(worker, args), world_size, **options)
        return WorkerGroup(worker, executor, auto_pad)

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self._executor.world_size

    @property
    def auto_pad(self) -> bool:
        """True if rows that cannot be split equally are filled up with copies."""
        return self._auto_pad

    @property
    def pids(self) -> Sequence[int]:
        """The workers' processes, by rank."""
        return self._executor.pids

    def mesh(self, name: str) -> Sequence[MeshPlace]:
        """Every worker's place in a mesh, asked for once.

        Raises:
            ConfigError: of some part of the rows no worker's result is taken, or more than one's.
        """
        if name not in self._meshes:
            places = self._run(MESH_PLACE, self._methods[MESH_PLACE], (name,), {})
            takers = sorted(place.dp_rank for place in places if place.is_collect)
            wanted = sorted({place.dp_rank for place in places})
            if takers != wanted or wanted != list(range(len(wanted))):
                raise ConfigError(
                    f"mesh {name!r}: results are taken of dp ranks {takers}, wanted is one of each of "
                    f"{list(range(len(wanted)))}; see place_in_mesh"
                )
            self._meshes[name] = places
        return self._meshes[name]

    def worker(self, rank: int) -> GroupMember:
        """Return the worker of a rank, for methods that are called on one alone.

        Raises:
            ConfigError: there is no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise ConfigError(f"rank {rank} is none of a group of {self.world_size} workers")
        return GroupMember(self, rank)

    def submit(self, name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a registered method, and return a future of its result, whether it blocks or not."""
        return self._thread.submit(self._run, name, self._note(name), args, kwargs)

    def submit_to(self, rank: int, name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The same on one worker; its arguments go there as they are."""
        self._note(name)
        call = WorkerCall(args, kwargs)
        return self._thread.submit(lambda: self._results(name, {rank: call})[0])

    def _note(self, name: str) -> RegisteredMethod:
        note = self.__dict__.get("_methods", {}).get(name)
        if note is None:
            raise AttributeError(f"no method {name!r} is registered; those are {dir(self)}")
        return cast("RegisteredMethod", note)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name, self._note(name))

    def __dir__(self) -> list[str]:
        return sorted(self._methods)

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let calls in flight end, then the workers."""
        self._thread.shutdown()
        self._executor.close()

    def _call(self, name: str, note: RegisteredMethod, /, *args: Any, **kwargs: Any) -> Any:
        future = self.submit(name, *args, **kwargs)
        return future.result() if note.blocking else future

    def _run(
        self, name: str, note: RegisteredMethod, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run a call, in the group's thread."""
        mode = mode_of(note)
        args = tuple(_awaited(value) for value in args)
        kwargs = {key: _awaited(value) for key, value in kwargs.items()}
        dispatched: Dispatched = mode.dispatch(self, args, kwargs)
        calls = dict(enumerate(dispatched.calls))
        if note.execute is Execute.RANK_ZERO:
            return self._results(name, {0: calls[0]})[0]
        return mode.collect(self, dispatched, self._results(name, calls))

    def _results(self, name: str, calls: Mapping[int, WorkerCall]) -> list[Any]:
        replies = self._executor.run(name, calls)
        for rank, reply in sorted(replies.items()):
            if reply.failure is not None:
                raise reply.failure.error(rank, name)
        return [replies[rank].result for rank in calls]


class GroupMember:
    """One worker of a group, and its registered methods; calls keep their place among the group's."""

    def __init__(self, group: WorkerGroup, rank: int) -> None:
        self._group = group
        self._rank = rank

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self._group.submit_to(self._rank, name, *args, **kwargs).result()

        return call


def _awaited(value: Any) -> Any:
    return value.result() if isinstance(value, Future) else value
