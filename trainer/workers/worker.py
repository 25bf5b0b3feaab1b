"""The worker's side of a group: the base class of workers, and the loop that calls their methods."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from headway.contracts.config.model import Device
from headway.contracts.errors import ErrorBody, ServiceError, WorkerError
from trainer.topology import Topology
from trainer.workers.dispatch import Dispatch, MeshPlace, WorkerCall, register
from trainer.workers.profiling import WorkerProfiler

MESH_PLACE = "mesh_place"


class Worker:
    """One rank of a role. Its process reads its rank from the environment, as with torchrun."""

    def __init__(self, device: Device = "auto") -> None:
        self.topology = Topology.from_environment(device)
        self._places: dict[str, MeshPlace] = {}
        self._profiler = WorkerProfiler()

    def place_in_mesh(self, mesh: str, place: MeshPlace) -> None:
        """Set which rows this worker works on in methods that are registered with `mesh_mode(mesh)`."""
        self._places[mesh] = place

    @register(Dispatch.ONE_TO_ALL)
    def mesh_place(self, mesh: str) -> MeshPlace:
        """Return this worker's place in a mesh; unless it was set, every worker has rows of its own."""
        return self._places.get(mesh, MeshPlace(self.topology.rank))

    @register(Dispatch.ONE_TO_ALL)
    def start_profile(self, ranks: Sequence[int]) -> None:
        """Begin a profile of the processes of these ranks."""
        if self.topology.rank in ranks:
            self._profiler.start()

    @register(Dispatch.ONE_TO_ALL)
    def stop_profile(self, folder: str) -> None:
        """End the profile, and write it as `rank-N.json` into a folder."""
        self._profiler.stop(Path(folder) / f"rank-{self.topology.rank}.json")

    def close(self) -> None:
        """Leave the process group; the last call."""
        self.topology.leave()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Worker to build in every process; all of it can be pickled."""

    worker: type[Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the worker class."""
        return self.worker.__name__

    def build(self) -> Any:
        """Build the worker, in its process."""
        return self.worker(*self.args, **self.kwargs)


@dataclass(frozen=True, slots=True)
class WorkerFailure:
    """Exception of a worker, in a form that every process can read."""

    body: ErrorBody
    where: str
    """Its traceback."""

    def error(self, rank: int, method: str) -> ServiceError:
        """The error of the same class, with what happened where."""
        error = ServiceError.from_body(self.body)
        error.add_note(f"raised by worker {rank} in {method}:\n{self.where}")
        return error


@dataclass(frozen=True, slots=True)
class WorkerReply:
    """A result, or a failure."""

    result: Any = None
    failure: WorkerFailure | None = None


class WorkerHost:
    """Builds a worker, and calls it."""

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self.worker = spec.build()

    def answer(self, method: str, call: WorkerCall) -> WorkerReply:
        """Never raises."""
        try:
            with torch.profiler.record_function(method):
                return WorkerReply(getattr(self.worker, method)(*call.args, **call.kwargs))
        except Exception as error:  # noqa: BLE001 -- the driver raises it
            return WorkerReply(failure=describe(error))


def describe(error: Exception) -> WorkerFailure:
    """Convert an exception to a failure that every process can read."""
    where = "".join(traceback.format_exception(error))
    if not isinstance(error, ServiceError):
        error = WorkerError(f"{type(error).__name__}: {error}")
    return WorkerFailure(error.to_body(), where)


RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""Variables that make a process a rank of its group."""


def rank_environment(
    rank: int, local_rank: int, world_size: int, store: tuple[str, int]
) -> dict[str, str]:
    """Return the variables that torchrun would set; the store is the driver's."""
    host, port = store
    # All ranks are clients of the store; none of them opens one: "True".
    values = (str(rank), str(local_rank), str(world_size), host, str(port), "True")
    return dict(zip(RANK_VARIABLES, values, strict=True))
