"""The worker's side of a group: the base class of workers, and the one who calls their methods."""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.contracts.errors import ErrorBody, ServiceError, WorkerError
from trainer.topology import Topology
from trainer.workers.dispatch import Call, Dispatch, MeshPlace, register

MESH_PLACE = "mesh_place"


class Worker:
    """One rank of a role. Its process is told by the environment who it is, as by torchrun."""

    def __init__(self) -> None:
        self.topology = Topology.from_environment()
        self._places: dict[str, MeshPlace] = {}

    def place_in_mesh(self, mesh: str, place: MeshPlace) -> None:
        """Say which rows this worker works on in methods that are registered with `mesh_mode(mesh)`."""
        self._places[mesh] = place

    @register(Dispatch.ONE_TO_ALL)
    def mesh_place(self, mesh: str) -> MeshPlace:
        """Where this worker is in a mesh; each for itself, unless it said otherwise."""
        return self._places.get(mesh, MeshPlace(self.topology.rank))

    def close(self) -> None:
        """The last call."""
        self.topology.leave()


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What to build in every process; all of it can be pickled."""

    worker: type[Worker]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Of the class."""
        return self.worker.__name__


@dataclass(frozen=True, slots=True)
class Failure:
    """What a worker raised, in words that every process understands."""

    body: ErrorBody
    where: str
    """Its traceback."""

    def error(self, rank: int, method: str) -> ServiceError:
        """The error of the same class, with what happened where."""
        error = ServiceError.from_body(self.body)
        error.add_note(f"raised by worker {rank} in {method}:\n{self.where}")
        return error


@dataclass(frozen=True, slots=True)
class Reply:
    """A result, or a failure."""

    result: Any = None
    failure: Failure | None = None


class Host:
    """Builds a worker, and calls it."""

    def __init__(self, spec: WorkerSpec, environment: Mapping[str, str]) -> None:
        os.environ.update(environment)
        self._worker = spec.worker(*spec.args, **spec.kwargs)

    def answer(self, method: str, call: Call) -> Reply:
        """Never raises."""
        try:
            return Reply(getattr(self._worker, method)(*call.args, **call.kwargs))
        except Exception as error:  # noqa: BLE001 -- the driver raises it
            return Reply(failure=describe(error))

    def close(self) -> None:
        """Let the worker go."""
        self._worker.close()


def describe(error: Exception) -> Failure:
    """In words."""
    where = "".join(traceback.format_exception(error))
    if not isinstance(error, ServiceError):
        error = WorkerError(f"{type(error).__name__}: {error}")
    return Failure(error.to_body(), where)


def rank_environment(
    rank: int, local_rank: int, world_size: int, store: tuple[str, int]
) -> dict[str, str]:
    """What torchrun would set; the store is the driver's."""
    host, port = store
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        # All ranks are clients of the store; none of them opens one.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
