"""Rank and world size as one record, and the collectives that the trainer needs besides FSDP's."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Topology:
    """This process among the trainer's ranks."""

    rank: int
    world_size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Whose collectives these are; None is the default group."""

    @property
    def is_main(self) -> bool:
        """Whether this rank talks to the outside."""
        return self.rank == 0

    @staticmethod
    def from_environment() -> Topology:
        """What torchrun set; one process without it."""
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        device = (
            torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
        )
        return Topology(
            int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")), device
        )

    def join(self, alone: bool = False) -> None:
        """Create the process group, if there is more than one rank or one rank needs it `alone`."""
        is_cuda = self.device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(self.device)
        if dist.is_initialized():
            return
        backend = "cpu:gloo,cuda:nccl" if is_cuda else "gloo"
        if self.world_size > 1:
            dist.init_process_group(backend)
        elif alone:
            store = dist.HashStore()  # type: ignore[attr-defined] # documented, not in __all__
            dist.init_process_group(backend, store=store, rank=0, world_size=1)

    def apart(self) -> Topology:
        """The same ranks with collectives of their own, which may run beside others; collective."""
        return self if self.world_size == 1 else replace(self, group=dist.new_group())

    def leave(self) -> None:
        """Destroy the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier(self.group)

    def sum(self, values: list[float]) -> list[float]:
        """Element-wise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, value: int) -> int:
        """Largest over the ranks."""
        return int(self.maxima([float(value)])[0])

    def maxima(self, values: list[float]) -> list[float]:
        """Element-wise largest over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

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
        if self.world_size == 1:
            if payload is None:
                raise ValueError("rank 0 has nothing to broadcast")
            return payload
        box = [payload]
        dist.broadcast_object_list(box, 0, self.group, torch.device("cpu"))
        received = box[0]
        if received is None:
            raise ValueError("rank 0 had nothing to broadcast")
        return received

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, on every rank."""
        if self.world_size == 1:
            return [payload]
        boxes: list[bytes | None] = [None] * self.world_size
        dist.all_gather_object(boxes, payload, self.group)
        return [box for box in boxes if box is not None]

    def _reduce(self, values: list[float], operation: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world_size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, operation, self.group)
        result: list[float] = tensor.tolist()
        return result
