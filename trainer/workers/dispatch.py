"""Dispatch of a call on a group: one call per worker, and their results as one result.

`register` only leaves a note on a method; a `WorkerGroup` reads it. A mode is a pair of functions, and
more of them can be registered by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, TypeVar

from headway.contracts.errors import ConfigError, DataError
from headway.contracts.registry import Registry
from trainer.workers.data_proto import DataProto

Method = TypeVar("Method", bound=Callable[..., Any])
MINI_BATCH_SIZE, SHUFFLE_SEED = "mini_batch_size", "shuffle_seed"
"""Notes of a batch: rows of a mini-batch, over all workers; seed of the order of rows."""

_NOTE = "_registered"


class Dispatch(StrEnum):
    """The modes that are there."""

    ONE_TO_ALL = "one_to_all"
    """Every worker gets the same; a list of all results."""
    ALL_TO_ALL = "all_to_all"
    """Every worker gets the arguments as they are, and picks its own; a list of all results."""
    DP_COMPUTE = "dp_compute"
    """Every argument is a list with one entry for each worker; a list of all results."""
    DP_COMPUTE_PROTO = "dp_compute_proto"
    """Every argument is a `DataProto`: each worker gets its part of the rows; all rows in order."""
    DP_COMPUTE_PROTO_WITH_FUNC = "dp_compute_proto_with_func"
    """The same; the first argument is a function, which every worker gets."""
    DP_COMPUTE_METRIC = "dp_compute_metric"
    """Split in the same way; a list of all results."""
    DP_COMPUTE_MINI_BATCHES = "dp_compute_mini_batches"
    """Every argument is a `DataProto`: each worker gets a list with its part of each mini-batch, which so
    has the same rows whatever the number of workers. The result is the first worker's."""
    DIRECT_ROLLOUT_METHOD = "direct_rollout_method"
    """Called on one worker, through `WorkerGroup.worker(rank)`; the group itself refuses it."""


class Execute(StrEnum):
    """Workers that run a call."""

    ALL = "all"
    RANK_ZERO = "rank_zero"
    """The first worker alone; its result is no list."""


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """Arguments of one worker's call."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A call for each worker."""

    calls: Sequence[WorkerCall]
    rows: int = 0
    """Number of rows of all parts together, padding included; 0 if the call has no rows to split."""
    num_padding: int = 0
    """Number of copies at the end of these rows."""


@dataclass(frozen=True, slots=True)
class MeshPlace:
    """A worker in a mesh in which some share their data: ranks of a tensor or sequence parallel group."""

    dp_rank: int
    """Data-parallel rank: workers with the same one work on the same part of the rows."""
    is_collect: bool = True
    """True on the one worker of each part whose result is taken."""


class WorkerGroupView(Protocol):
    """Part of a worker group that a dispatch mode may use."""

    @property
    def world_size(self) -> int:
        """Number of workers."""

    @property
    def auto_pad(self) -> bool:
        """True if rows that cannot be split equally are filled up with copies."""

    def mesh(self, name: str) -> Sequence[MeshPlace]:
        """Every worker's place in a mesh."""


DispatchFn = Callable[[WorkerGroupView, tuple[Any, ...], Mapping[str, Any]], Dispatched]
CollectFn = Callable[[WorkerGroupView, Dispatched, list[Any]], Any]


@dataclass(frozen=True, slots=True)
class DispatchMode:
    """A way to split a call, and to put results together."""

    name: str
    dispatch: DispatchFn
    collect: CollectFn
    cuts_rows: bool = True
    """False: a call can be run by the first worker alone."""


@dataclass(frozen=True, slots=True)
class RegisteredMethod:
    """Arguments of `register`, as stored on the method."""

    mode: str | DispatchMode
    execute: Execute
    blocking: bool


MODES: Registry[DispatchMode] = Registry("dispatch mode")


def register_dispatch_mode(mode: DispatchMode) -> None:
    """Add a mode under its name.

    Raises:
        ConfigError: the name is taken.
    """
    MODES.register(mode.name, mode)


def register(
    dispatch_mode: str | DispatchMode = Dispatch.DP_COMPUTE_PROTO,
    execute_mode: Execute = Execute.ALL,
    blocking: bool = True,
) -> Callable[[Method], Method]:
    """Make a worker's method one that its group can be called with; called directly it is as before.

    Args:
        blocking: False returns a future of the result.
    """

    def note(method: Method) -> Method:
        setattr(method, _NOTE, RegisteredMethod(dispatch_mode, execute_mode, blocking))
        return method

    return note


def registered_methods(worker: type) -> dict[str, RegisteredMethod]:
    """The methods of a class that are called through a group.

    Raises:
        ConfigError: the first worker alone would get a part of the rows.
        UnknownName: no such mode is registered.
    """
    found = {}
    for name in dir(worker):
        note = getattr(getattr(worker, name, None), _NOTE, None)
        if isinstance(note, RegisteredMethod):
            mode = mode_of(note)
            if note.execute is Execute.RANK_ZERO and mode.cuts_rows:
                raise ConfigError(
                    f"{worker.__name__}.{name} is run by the first worker alone, and {mode.name} would "
                    "give it a part of the rows; register it as one_to_all"
                )
            found[name] = note
    return found


def mode_of(note: RegisteredMethod) -> DispatchMode:
    """The pair of functions."""
    return note.mode if isinstance(note.mode, DispatchMode) else MODES.get(str(note.mode))


def mesh_mode(mesh: str) -> DispatchMode:
    """Dispatch as `DP_COMPUTE_PROTO` does, over the places of a mesh: workers with one `dp_rank` get
    the same rows, and the result of one of them is taken.
    """

    def dispatch(
        group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Dispatched:
        places = group.mesh(mesh)
        parts = _cut(group, args, kwargs, max(place.dp_rank for place in places) + 1)
        calls = [parts.calls[place.dp_rank] for place in places]
        return Dispatched(calls, parts.rows, parts.num_padding)

    def collect(group: WorkerGroupView, dispatched: Dispatched, results: list[Any]) -> Any:
        places = group.mesh(mesh)
        taken = {p.dp_rank: r for p, r in zip(places, results, strict=True) if p.is_collect}
        return _rows_of(dispatched, [taken[dp_rank] for dp_rank in sorted(taken)])

    return DispatchMode(f"mesh {mesh}", dispatch, collect)


def _refuse_group(
    group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dispatched:
    raise ConfigError(
        "this method is called on one worker, not on all of a group; use group.worker(rank)"
    )


def _to_all(group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Dispatched:
    return Dispatched([WorkerCall(args, kwargs)] * group.world_size)


def _one_each(
    group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dispatched:
    for name, value in _named(args, kwargs):
        if not isinstance(value, list | tuple) or len(value) != group.world_size:
            size = len(value) if isinstance(value, list | tuple) else type(value).__name__
            raise DataError(
                f"{name} is {size}, wanted is a list with an entry for each of {group.world_size} workers"
            )
    return Dispatched(
        [
            WorkerCall(
                tuple(value[rank] for value in args), {n: v[rank] for n, v in kwargs.items()}
            )
            for rank in range(group.world_size)
        ]
    )


def _rows_each(
    group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dispatched:
    return _cut(group, args, kwargs, group.world_size)


def _function_and_rows(
    group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dispatched:
    if not args or not callable(args[0]):
        raise DataError("the first argument is no function, and every worker would call it")
    cut = _cut(group, args[1:], kwargs, group.world_size)
    calls = [WorkerCall((args[0], *call.args), call.kwargs) for call in cut.calls]
    return Dispatched(calls, cut.rows, cut.num_padding)


def _mini_batches_each(
    group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Dispatched:
    _check_rows(args, kwargs)

    def parts(batch: DataProto) -> list[list[DataProto]]:
        """Return for each worker its part of each mini-batch."""
        size = batch.meta.get(MINI_BATCH_SIZE) or len(batch)
        minis = batch.minibatches(size, seed=batch.meta.get(SHUFFLE_SEED))
        cut = [_filled(group, mini, group.world_size).chunk(group.world_size) for mini in minis]
        return [list(of_worker) for of_worker in zip(*cut, strict=True)]

    of_args = [parts(value) for value in args]
    of_kwargs = {name: parts(value) for name, value in kwargs.items()}
    return Dispatched(
        [
            WorkerCall(tuple(p[rank] for p in of_args), {n: p[rank] for n, p in of_kwargs.items()})
            for rank in range(group.world_size)
        ]
    )


def _cut(
    group: WorkerGroupView, args: tuple[Any, ...], kwargs: Mapping[str, Any], count: int
) -> Dispatched:
    """Split all batches into equal parts; the caller's objects stay as they are."""
    _check_rows(args, kwargs)
    filled = {name: _filled(group, value, count) for name, value in _named(args, kwargs)}
    whole = next(iter(filled.values()))
    parts = {name: value.chunk(count) for name, value in filled.items()}
    positions = list(parts.values())[: len(args)]
    calls = [
        WorkerCall(
            tuple(p[number] for p in positions), {name: parts[name][number] for name in kwargs}
        )
        for number in range(count)
    ]
    return Dispatched(calls, len(whole), whole.num_padding)


def _filled(group: WorkerGroupView, batch: DataProto, count: int) -> DataProto:
    return batch.unpad().pad_to(count) if group.auto_pad else batch


def _check_rows(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    named = _named(args, kwargs)
    if not named:
        raise DataError("there is no batch to split; give a DataProto at least")
    for name, value in named:
        if not isinstance(value, DataProto):
            raise DataError(f"{name} is a {type(value).__name__}, wanted is a DataProto")
    sizes = {name: len(value) for name, value in named}
    if len(set(sizes.values())) > 1:
        raise DataError(f"batches of one call have {sizes} rows; wanted is one number for all")


def _named(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [*((f"argument {at}", value) for at, value in enumerate(args)), *kwargs.items()]


def _all_results(group: WorkerGroupView, dispatched: Dispatched, results: list[Any]) -> Any:
    return results


def _first_result(group: WorkerGroupView, dispatched: Dispatched, results: list[Any]) -> Any:
    return results[0]


def _all_rows(group: WorkerGroupView, dispatched: Dispatched, results: list[Any]) -> Any:
    return _rows_of(dispatched, results)


def _rows_of(dispatched: Dispatched, results: list[Any]) -> DataProto:
    """The rows of all parts, without those that came of padding."""
    wrong = [type(result).__name__ for result in results if not isinstance(result, DataProto)]
    if wrong:
        raise DataError(f"a worker returned a {wrong[0]}, and this mode puts DataProtos together")
    whole = DataProto.concat([replace(result, num_padding=0) for result in results])
    if not whole.columns or not dispatched.num_padding:
        return whole
    # A row may have become several, next to one another.
    if len(whole) % dispatched.rows:
        raise DataError(
            f"{dispatched.rows} rows became {len(whole)}, so those made from the "
            f"{dispatched.num_padding} padding rows are unknown: return the same number for each row"
        )
    times = len(whole) // dispatched.rows
    return whole.rows(range(len(whole) - dispatched.num_padding * times))


for _mode in (
    DispatchMode(Dispatch.ONE_TO_ALL, _to_all, _all_results, cuts_rows=False),
    DispatchMode(Dispatch.ALL_TO_ALL, _to_all, _all_results, cuts_rows=False),
    DispatchMode(Dispatch.DP_COMPUTE, _one_each, _all_results),
    DispatchMode(Dispatch.DP_COMPUTE_PROTO, _rows_each, _all_rows),
    DispatchMode(Dispatch.DP_COMPUTE_PROTO_WITH_FUNC, _function_and_rows, _all_rows),
    DispatchMode(Dispatch.DP_COMPUTE_METRIC, _rows_each, _all_results),
    DispatchMode(Dispatch.DP_COMPUTE_MINI_BATCHES, _mini_batches_each, _first_result),
    DispatchMode(Dispatch.DIRECT_ROLLOUT_METHOD, _refuse_group, _all_results, cuts_rows=False),
):
    register_dispatch_mode(_mode)
