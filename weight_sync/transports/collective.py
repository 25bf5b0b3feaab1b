"""Weights over a process group of trainer and servers: the receiving end.

The trainer is rank 0 and broadcasts; the group stands outside of the default one, made as
`init_custom_process_group` of SGLang makes it, so that its trainers join unchanged. Receiving blocks
the calling thread and ends in every case: after `timeout_s` the group is aborted, and a group that
failed once is of no more use. What was received is whole tensors in memory of their own; nothing of a
model changes here.

Gloo keeps its deadline itself. NCCL does not notice a dead peer, and its watchdog would end the whole
process: there our deadline comes first and aborts the communicator.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.rendezvous import rendezvous

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.channel import StagedWeights
from weight_sync.manifest import DTYPES
from weight_sync.tensors import check_fit

TICK_S = 0.001
UNPROVEN = ""
"""Digest of received weights: nobody published one, and to compute it takes as long as to receive."""

_make_group: Any = c10d._new_process_group_helper
"""Not public, but the only way to a group outside of the default one; SGLang's trainers call it too."""

GroupBackend = Literal["gloo", "nccl"]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where a group meets, and who we are in it."""

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
    """With or without `torch.` before it."""
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


class WeightGroup:
    """A joined group; one thread receives, any thread may close it."""

    def __init__(self, address: GroupAddress, group: Any, timeout_s: float) -> None:
        self.address = address
        self._group = group
        self._timeout_s = timeout_s
        is_gloo = address.backend == "gloo"
        self._device = torch.device("cpu" if is_gloo else "cuda")

    def receive(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """One broadcast per tensor, in this order.

        Raises:
            SyncError: a peer died or did not come in time; close the group.
        """
        tensors = {s.name: self._buffer(s.shape, s.torch_dtype) for s in specs}
        self._broadcast(list(tensors.values()))
        return tensors

    def receive_flattened(self, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
        """One broadcast of bytes: the contiguous tensors one after the other, in this order.

        Raises:
            SyncError: as for `receive`.
        """
        flat = self._buffer((sum(s.num_bytes for s in specs),), torch.uint8)
        self._broadcast([flat])
        parts = flat.split([s.num_bytes for s in specs])
        # Cloned: a part may begin where its type must not, and would keep the whole bucket alive.
        return {
            spec.name: part.clone().view(spec.torch_dtype).view(spec.shape)
            for spec, part in zip(specs, parts, strict=True)
        }

    def close(self) -> None:
        """Leave; waiting peers are told by their broken connections."""
        if self._group is None:
            return
        group, self._group = self._group, None
        if self.address.backend == "nccl":
            group.abort()
        dist.destroy_process_group(group)

    def _buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=self._device)
        except RuntimeError as error:
            raise SyncError(f"no memory to receive {shape} of {dtype}: {error}") from error

    def _broadcast(self, buffers: list[torch.Tensor]) -> None:
        if self._group is None:
            raise SyncError(f"the group {self.address.name!r} was closed; join it again")
        deadline = time.monotonic() + self._timeout_s
        try:
            works = [dist.broadcast(b, src=0, group=self._group, async_op=True) for b in buffers]
            for work in works:
                while not work.is_completed():
                    if time.monotonic() > deadline:
                        raise SyncError(
                            f"the trainer of group {self.address.name!r} sent nothing for "
                            f"{self._timeout_s:g} s"
                        )
                    time.sleep(TICK_S)
                work.wait()
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise SyncError(
                f"the broadcast in group {self.address.name!r} failed: {reason}"
            ) from error


def join_group(address: GroupAddress, timeout_s: float) -> WeightGroup:
    """Meet the others at the address; returns once all have come.

    Raises:
        SyncError: they did not come in time, or this machine has no such backend.
    """
    if not 0 < address.rank < address.world_size:
        raise SyncError(
            f"rank {address.rank} in a group of {address.world_size}; rank 0 is the trainer's, give "
            "rank_offset from 1 up to world_size - 1"
        )
    if address.backend == "nccl" and not torch.cuda.is_available():
        raise SyncError("backend nccl needs a GPU here, there is none; take backend gloo")
    limit = timedelta(seconds=timeout_s)
    endpoint = f"tcp://{address.host}:{address.port}"
    try:
        store, rank, world_size = next(
            rendezvous(endpoint, address.rank, address.world_size, timeout=limit)
        )
        store.set_timeout(limit)
        group, _ = _make_group(
            world_size,
            rank,
            [],
            c10d.Backend(address.backend),
            c10d.PrefixStore(address.name, store),
            group_name=address.name,
            timeout=limit if address.backend == "gloo" else 2 * limit,
        )
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise SyncError(f"cannot join group {address.name!r} at {endpoint}: {reason}") from error
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return WeightGroup(address, group, timeout_s)


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
        return StagedWeights(meta.version, UNPROVEN, {name: tensors[name] for name in expected})
