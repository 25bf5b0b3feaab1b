"""Rank and world size as one record, and the collectives that the trainer needs besides FSDP's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.contracts.config.model import Device
from headway.contracts.errors import ConfigError
from weight_sync.device import choose_device, use_device

TIMEOUT_S = 3600.0
"""Seconds for what a rank does alone while the others wait: loading, writing, publishing."""


@dataclass(frozen=True, slots=True)
class Topology:
    """This process among the trainer's ranks."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Process group of these collectives; None is the default group."""
    timeout_s: float = TIMEOUT_S
    """Seconds after which a collective that some rank did not come to ends its process."""
    data_parallel_ranks: tuple[int, ...] = ()
    """Data-parallel rank of each rank; empty if each rank has a share of a batch to itself."""
    data_parallel_group: dist.ProcessGroup | None = None
    """Process group of this rank and one rank of every other share."""

    @property
    def is_main(self) -> bool:
        """True on the rank that talks to the outside."""
        return self.rank == 0

    @property
    def data_parallel(self) -> Topology:
        """Its rank is the number of this rank's share of a batch, its world size the number of shares.

        Ranks that work on one share together (tensor, pipeline, context parallel) have the same number.
        Collectives over it count each share once.
        """
        if not self.data_parallel_ranks:
            return self
        return Topology(
            self.data_parallel_ranks[self.rank],
            max(self.data_parallel_ranks) + 1,
            self.device,
            self.data_parallel_group,
            self.timeout_s,
        )

    @staticmethod
    def from_environment(device: Device = "auto", waits_s: float = 0.0) -> Topology:
        """Read the variables that torchrun sets; one process without them. Its device is the calling
        thread's from here on.

        Args:
            waits_s: seconds that the first rank may wait for the rollouts, while the others wait for it.
        Raises:
            ConfigError: as `choose_device`.
        """
        return Topology(
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
            choose_device(device),
            timeout_s=TIMEOUT_S + waits_s,
        )

    def join(self, alone: bool = False) -> None:
        """Create the process group, if there is more than one rank or one rank needs it `alone`.

        Raises:
            ConfigError: two ranks have the same GPU; on every rank.
        """
        use_device(self.device)
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        if self.world_size > 1:
            dist.init_process_group(backend, timeout=self.timeout)
            self._refuse_shared_gpus()
        elif alone:
            store = dist.HashStore()  # type: ignore[attr-defined] # documented, not in __all__
            dist.init_process_group(
                backend, store=store, rank=0, world_size=1, timeout=self.timeout
            )

    @property
    def timeout(self) -> timedelta:
        """`timeout_s`, for groups: one that is made without it has PyTorch's own."""
        return timedelta(seconds=self.timeout_s)

    def apart(self) -> Topology:
        """The same ranks with collectives of their own, which may run beside others; collective."""
        if self.world_size == 1:
            return self
        alone = replace(self, group=dist.new_group(timeout=self.timeout))
        ranks = self.data_parallel_ranks
        return alone.with_data_parallel_ranks(ranks) if ranks else alone

    def with_data_parallel_ranks(self, ranks: Sequence[int]) -> Topology:
        """The same ranks, some of which share the work on one part of a batch; collective.

        Args:
            ranks: data-parallel rank of each rank; 0, 0, 1, 1 if ranks 0 and 1 hold parts of one model.
        Raises:
            ConfigError: they are not those of all ranks, or shares have different numbers of ranks.
        """
        shares = [
            [rank for rank, share in enumerate(ranks) if share == number]
            for number in range(max(ranks, default=-1) + 1)
        ]
        if len(ranks) != self.world_size or len({len(share) for share in shares}) != 1:
            raise ConfigError(
                f"data-parallel ranks {list(ranks)} do not give {self.world_size} ranks equal shares; "
                "name one for each rank, 0 and up, each equally often"
            )
        if self.world_size == 1:
            return self
        groups = [
            (peers, dist.new_group(peers, timeout=self.timeout))
            for peers in map(list, zip(*shares, strict=True))
        ]
        own = next(group for peers, group in groups if self.rank in peers)
        return replace(self, data_parallel_ranks=tuple(ranks), data_parallel_group=own)

    def among(self, ranks: Sequence[int]) -> Topology | None:
        """Some of the ranks, with collectives of their own; None on the others. Collective over all."""
        group = None
        if self.world_size > 1:
            group = dist.new_group(list(ranks), timeout=self.timeout)
        if self.rank not in ranks:
            return None
        place = list(ranks).index(self.rank)
        return replace(self, rank=place, world_size=len(ranks), group=group)

    def leave(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for all ranks, on the CPU: what their GPUs have still to do, they go on doing."""
        self.sum([0.0])

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: int) -> int:
        """Largest over the ranks."""
        return int(self.maxima([float(value)])[0])

    def maxima(self, values: list[float]) -> list[float]:
        """Element-wise largest over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over the ranks, on its device and without waiting for it."""
        total = tensor.clone()
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, piece: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Every rank's piece, on every rank.

        Args:
            piece: [sizes[rank], ...] of this rank, on the CPU.
            sizes: of all ranks' pieces.
        """
        if self.world_size == 1:
            return [piece]
        # gloo gathers pieces of one size.
        padded = piece.new_zeros(max(sizes), *piece.shape[1:])
        padded[: len(piece)] = piece
        pieces = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(pieces, padded, self.group)
        return [whole[:size] for whole, size in zip(pieces, sizes, strict=True)]

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes on every rank."""
        received: bytes | None = self.broadcast(payload)
        if received is None:
            raise ValueError("rank 0 had nothing to broadcast")
        return received

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value that the rank `source` has, on every rank; it is pickled on its way."""
        if self.world_size == 1:
            return value
        box = [value if self.rank == source else None]
        device = torch.device("cpu")
        dist.broadcast_object_list(box, group=self.group, device=device, group_src=source)
        return box[0]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank."""
        if self.world_size == 1:
            return [payload]
        boxes: list[bytes | None] = [None] * self.world_size
        dist.all_gather_object(boxes, payload, self.group)
        return [box for box in boxes if box is not None]

    def _refuse_shared_gpus(self) -> None:
        """NCCL would hang, or say "duplicate GPU", at the first collective."""
        if self.device.type != "cuda":
            return
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        refuse_shared([each.decode() for each in self.gather_bytes(uuid.encode())])

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, self.group)
        result: list[float] = tensor.tolist()
        return result


def refuse_shared(uuids: Sequence[str]) -> None:
    """Refuse ranks that have the same GPU.

    Args:
        uuids: of the GPU of each rank.
    Raises:
        ConfigError: naming them.
    """
    for rank, uuid in enumerate(uuids):
        first = uuids.index(uuid)
        if first < rank:
            raise ConfigError(
                f"ranks {first} and {rank} have the same GPU ({uuid}); start one rank per GPU: several "
                "groups on a machine each want a CUDA_VISIBLE_DEVICES of their own"
            )
