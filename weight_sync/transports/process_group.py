"""A process group of a trainer and its servers, outside of the default one of either.

The trainer is rank 0 and broadcasts. The group uses the same keys as one that
`init_custom_process_group` of SGLang makes, so that its trainers and its engines join unchanged. It is
registered nowhere: one process can be several ranks, and a trainer's own groups see nothing of it.

Waiting ends in every case. NCCL is aborted, on a thread of its own (`nccl`). Gloo notices a closed
connection at once, but a broadcast that waits for a silent peer cannot be taken back, and destroying its
group would block the interpreter: it is left to a daemon thread until its own deadline, the group's
`timeout_s`. A group that failed once is not used again.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed.rendezvous import rendezvous

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.channel import StagedWeights
from weight_sync.manifest import DTYPES
from weight_sync.tensors import check_fit
from weight_sync.transports.daemon_calls import Watch, call_detached, start_detached
from weight_sync.transports.nccl import abort, failure_of, make_nccl_group

TICK_S = 0.0005
UNVERIFIED = ""
"""Digest of received weights: none was published, and computing it takes as long as receiving them."""

GroupBackend = Literal["gloo", "nccl", "ipc"]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Address of a group, and our rank in it."""

    name: str
    host: str
    port: int
    rank: int
    world_size: int
    backend: GroupBackend


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as its sender describes it."""

    name: str
    dtype: str
    """Type, with or without `torch.` in front."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """Raises:
        SyncError: a type that versions cannot hold.
        """
        known = DTYPES.get(self.dtype.removeprefix("torch."))
        if known is None:
            raise SyncError(f"{self.name} is of type {self.dtype}; known: {', '.join(DTYPES)}")
        return known

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


def group_device(backend: GroupBackend) -> torch.device:
    """Return where this thread's groups send from and receive to: of a GPU, the thread's own.

    Raises:
        SyncError: this machine has no such backend.
    """
    _check_backend(backend)
    if backend == "gloo" or (backend == "ipc" and not torch.cuda.is_available()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class WeightGroup:
    """A joined group; one thread sends or receives, any thread may close it."""

    def __init__(
        self, address: GroupAddress, group: Any, timeout_s: float, device: torch.device
    ) -> None:
        self.address = address
        self.device = device
        """Device that it sends from and receives to."""
        self._group = group
        self._timeout_s = timeout_s
        self._begun: deque[tuple[Any, torch.Tensor, Callable[[], object]]] = deque()
        """Broadcasts under way, the oldest first, with their memory, and what comes after them."""

    def receive(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """One broadcast per tensor, in this order.

        Raises:
            SyncError: a peer died or did not come in time; close the group.
        """
        tensors = {s.name: self._buffer(s.shape, s.torch_dtype) for s in specs}
        watch = self._deadline()
        for tensor in tensors.values():
            self._begin(tensor, watch)
        while self._begun:
            self.finish(watch)
        return tensors

    def receive_flattened(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """One broadcast of bytes: the contiguous tensors one after the other, in this order.

        Raises:
            SyncError: as for `receive`.
        """
        flat = self._buffer((sum(s.num_bytes for s in specs),), torch.uint8)
        watch = self._deadline()
        self._begin(flat, watch)
        self.finish(watch)
        parts = flat.split([s.num_bytes for s in specs])
        # Cloned: a part may begin where its type must not, and would keep the whole bucket alive.
        return {
            spec.name: part.clone().view(spec.torch_dtype).view(spec.shape)
            for spec, part in zip(specs, parts, strict=True)
        }

    def begin_receiving(self, target: torch.Tensor, watch: Watch) -> None:
        """One broadcast into [size] uint8 on any device, which it fills until it is finished.

        Raises:
            SyncError: a peer died, or `watch` raised it; close the group, and leave the target alone.
        """
        if target.device == self.device:
            self._begin(target, watch)
        else:
            flat = self._buffer(target.shape, torch.uint8)
            self._begin(flat, watch, lambda: target.copy_(flat))

    def begin_sending(self, payload: torch.Tensor, watch: Watch) -> None:
        """One broadcast of [size] uint8, from any device; for rank 0.

        The payload must not be written to until it is finished.

        Raises:
            SyncError: as for `begin_receiving`.
        """
        self._begin(payload.to(self.device), watch)

    def finish(self, watch: Watch) -> None:
        """End the oldest broadcast that was begun.

        Raises:
            SyncError: as for `begin_receiving`.
        """
        work, _, then = self._begun[0]
        try:
            while not work.is_completed():
                watch()
                time.sleep(TICK_S)
            if self.address.backend == "nccl" and (failure := failure_of(work)) is not None:
                raise self._failed(failure) from failure
            work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        finally:
            del work  # in the traceback of an error it would hold the connections
        if self._group is None:  # what was aborted is completed as well
            raise self._closed()
        self._begun.popleft()
        then()

    def close(self) -> None:
        """Leave; does not block. Waiting peers notice that their connections break."""
        if self._group is None:
            return
        group, self._group = self._group, None
        if self.address.backend == "nccl":
            start_detached(partial(abort, group))
            return
        pending = [work for work, _, _ in self._begun if not work.is_completed()]
        self._begun.clear()  # also those that have ended hold the connections
        if pending:
            threading.Thread(target=_outlive, args=(group, pending), daemon=True).start()

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self.device)
        except RuntimeError as error:
            raise SyncError(f"no memory to receive {shape} of {dtype}: {error}") from error

    def _deadline(self) -> Watch:
        deadline = time.monotonic() + self._timeout_s

        def watch() -> None:
            if time.monotonic() > deadline:
                raise SyncError(
                    f"the trainer of group {self.address.name!r} sent nothing for "
                    f"{self._timeout_s:g} s"
                )

        return watch

    def _begin(
        self, buffer: torch.Tensor, watch: Watch, then: Callable[[], object] = lambda: None
    ) -> None:
        group = self._group
        if group is None:
            raise self._closed()

        beside: Any = nullcontext()
        if self.device.type == "cuda":  # the buffer is this thread's stream's
            beside = torch.cuda.stream(torch.cuda.current_stream(self.device))

        def begin() -> Any:
            with beside:
                return group.broadcast(buffer, 0)

        try:
            # The first broadcast of NCCL makes the communicator, and blocks until all have come.
            work = begin() if self.address.backend == "gloo" else call_detached(begin, watch)
        except RuntimeError as error:
            raise self._failed(error) from error
        self._begun.append((work, buffer, then))

    def _closed(self) -> SyncError:
        return SyncError(f"the group {self.address.name!r} was closed; join it again")

    def _failed(self, error: Exception) -> SyncError:
        reason = str(error).partition("\n")[0]
        return SyncError(f"the broadcast in group {self.address.name!r} failed: {reason}")


def empty_bytes(size: int) -> torch.Tensor:
    """[size] uint8 on the CPU, in numpy's memory: that comes in huge pages, which fill 3 times as fast.

    Raises:
        SyncError: there is not so much.
    """
    try:
        return torch.from_numpy(np.empty(size, np.uint8))
    except MemoryError as error:
        raise SyncError(f"no memory for {size} bytes of weights: {error}") from error


def make_group(
    address: GroupAddress, store: Store, timeout_s: float, device: torch.device
) -> WeightGroup:
    """Join the others through a store; blocks until all have joined.

    Args:
        store: a connection of its own, on which this may block.
        timeout_s: to wait for the others, and of Gloo for every broadcast.
        device: from `group_device`.

    Raises:
        SyncError: they did not come in time, or this machine has no such backend.
    """
    _check_backend(address.backend)
    limit = timedelta(seconds=timeout_s)
    is_gloo = address.backend == "gloo"
    try:
        for prefix in (address.name, f"{address.name}/", "cpu/" if is_gloo else "cuda/"):
            store = PrefixStore(prefix, store)  # where torch looks for a group of this name
        group: Any
        if is_gloo:
            group = ProcessGroupGloo(store, address.rank, address.world_size, limit)
        else:
            group = make_nccl_group(store, address.rank, address.world_size, timeout_s)
        group._set_sequence_number_for_group()
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise SyncError(
            f"cannot join group {address.name!r} at {_endpoint(address)}: {reason}"
        ) from error
    return WeightGroup(address, group, timeout_s, device)


def join_group(address: GroupAddress, timeout_s: float) -> WeightGroup:
    """Join a trainer that waits at the address; returns once all have joined.

    Raises:
        SyncError: they did not come in time, or this machine has no such backend.
    """
    if not 0 < address.rank < address.world_size:
        raise SyncError(
            f"rank {address.rank} in a group of {address.world_size}; rank 0 is the trainer's, give "
            "rank_offset from 1 up to world_size - 1"
        )
    _check_backend(address.backend)  # before anybody is waited for
    limit = timedelta(seconds=timeout_s)
    endpoint = _endpoint(address)
    try:
        store, _, _ = next(rendezvous(endpoint, address.rank, address.world_size, timeout=limit))
        store.set_timeout(limit)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise SyncError(f"cannot join group {address.name!r} at {endpoint}: {reason}") from error
    return make_group(address, store, timeout_s, group_device(address.backend))


@runtime_checkable
class WeightsSource(Protocol):
    """The weights that serve, by the names of the model."""

    @property
    def parameters(self) -> Mapping[str, torch.Size]: ...

    def read_parameter(self, name: str) -> torch.Tensor:
        """A copy on the CPU.

        Raises:
            DataError: no such parameter.
        """


class CollectiveReader:
    """`WeightReader` of tensors that were received; those that were not keep their value."""

    def __init__(self, received: Mapping[str, torch.Tensor], source: WeightsSource) -> None:
        self._received = received
        self._source = source

    def stage(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> StagedWeights:
        kept = {
            name: self._source.read_parameter(name)
            for name in expected
            if name not in self._received
        }
        tensors = {**kept, **self._received}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        check_fit(shapes, expected, tensors.__getitem__, meta.path)
        return StagedWeights(meta.version, UNVERIFIED, {name: tensors[name] for name in expected})


def _check_backend(backend: GroupBackend) -> None:
    if backend == "nccl" and not torch.cuda.is_available():
        raise SyncError("backend nccl needs a GPU here, there is none; take backend gloo")


def _endpoint(address: GroupAddress) -> str:
    return f"tcp://{address.host}:{address.port}"


def _outlive(group: Any, pending: list[Any]) -> None:
    """Hold a group of Gloo until its last broadcast has ended, then let it go."""
    for work in pending:
        try:
            work.wait()
        except RuntimeError:
            continue  # that it fails is what we wait for
    del group
