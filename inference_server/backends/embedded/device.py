"""Device of the engine: all differences between the CPU and a GPU, in one place.

On a GPU a launch returns before it is done, and every copy between host and device costs a launch and
perhaps a wait. So what a step needs goes over in one copy from pinned memory, and what it found out
comes back in one.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch import Tensor

from headway.contracts.config.model import Device as DeviceSetting
from weight_sync.device import choose_device

log = logging.getLogger(__name__)

ALIGNMENT = 16
"""Bytes: each tensor of a packed copy begins at a multiple of it."""
FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
"""FlashAttention takes heads up to this size, in multiples of 8."""

VarlenAttention = Callable[..., Any]
"""Kernel with the arguments of `torch.nn.attention.varlen.varlen_attn`."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Launches that were recorded once and are replayed as one."""

    replay: Callable[[], None]
    output: Tensor
    """Output of the recorded work; `replay` writes it again."""
    memory: Any = None
    """Memory of what is neither input nor output; other graphs may use it if no two are replayed at
    once.
    """


class Device:
    """The CPU: all memory is here, and a call returns when it is done."""

    def __init__(self, where: torch.device | None = None) -> None:
        self.where = torch.device("cpu") if where is None else where

    @property
    def is_host(self) -> bool:
        """True if its memory is the host's."""
        return True

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Context of all work of the engine's thread."""
        with torch.inference_mode():
            yield

    @contextmanager
    def staging(self) -> Iterator[None]:
        """Context of copies of weights in another thread; they are done when it ends."""
        yield

    def synchronize(self) -> None:
        """Wait until all that the engine asked for is done."""

    def place(self, module: torch.nn.Module) -> None:
        """Move a model's parameters and buffers here."""
        module.to(self.where)

    def free_bytes(self) -> int:
        """Memory that can be had now."""
        return psutil.virtual_memory().available

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
        """Attention over paged keys and values; None where there is no kernel for it."""
        return None

    def send(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> list[Tensor]:
        """Tensors of the host on this device, in one copy.

        Args:
            into: [bytes] uint8 memory of the device, large enough; None takes new memory.
        """
        return list(tensors)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Ask for tensors of this device, in one copy; what comes back waits for them, but not for what
        is launched after this call.
        """
        held = list(tensors)
        return lambda: held

    def hold(self, tensor: Tensor) -> Tensor:
        """The same numbers in memory of the host from which copies to the device are fast."""
        return tensor.contiguous()

    def capture(self, work: Callable[[], Tensor], beside: Graph | None = None) -> Graph | None:
        """Record the launches of `work`, which was run before; None where that cannot be.

        Args:
            beside: a graph whose memory this one may use.
        """
        return None


class Accelerator(Device):
    """A device with memory of its own."""

    @property
    def is_host(self) -> bool:
        return False

    def send(self, tensors: Sequence[Tensor], into: Tensor | None = None) -> list[Tensor]:
        places, size = packed_places(tensors)
        host = self._host_bytes(size)
        for place, tensor in zip(places, tensors, strict=True):
            host[place : place + tensor.nbytes] = tensor.reshape(-1).view(torch.uint8)
        if into is None:
            packed = host.to(self.where, non_blocking=True)
        else:
            packed = into[:size].copy_(host, non_blocking=True)
        return unpacked(packed, places, tensors)

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        if not tensors:
            return list
        flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors]
        kinds = [(len(part), t.dtype, t.shape) for part, t in zip(flat, tensors, strict=True)]
        host, wait = self._copied(torch.cat(flat))

        def read() -> list[Tensor]:
            wait()
            parts = host.split([size for size, _, _ in kinds])
            return [  # cloned: aligned for its type
                part.clone().view(dtype).view(shape)
                for part, (_, dtype, shape) in zip(parts, kinds, strict=True)
            ]

        return read

    def _host_bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8)

    def _copied(self, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """The same bytes on the host, and what to call before they are read."""
        return packed.cpu(), lambda: None


class CudaDevice(Accelerator):
    """One GPU. Every thread that works on it has to select it: a new thread starts on the first GPU."""

    def __init__(self, where: torch.device) -> None:
        index = torch.cuda.current_device() if where.index is None else where.index
        super().__init__(torch.device("cuda", index))
        self._staging = torch.cuda.Stream(self.where)
        self._recording = torch.cuda.Stream(self.where)

    @contextmanager
    def decoding(self) -> Iterator[None]:
        torch.cuda.set_device(self.where)
        with torch.inference_mode():
            yield

    @contextmanager
    def staging(self) -> Iterator[None]:
        with torch.cuda.device(self.where), torch.cuda.stream(self._staging):
            yield
            self._staging.synchronize()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.where)

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self.where)[0]
        return free

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
        fits = dtype in FLASH_DTYPES and head_dim % 8 == 0 and head_dim <= FLASH_HEAD_DIM
        is_new = torch.version.hip is None and torch.cuda.get_device_capability(self.where)[0] >= 8
        paged = paged_varlen_attention()
        if fits and is_new and paged is not None:
            return paged
        log.warning(
            "torch %s has no paged FlashAttention for %s and heads of %d on this GPU, so attention is "
            "slow; torch 2.13 has it for float16 and bfloat16 on compute capability 8.0 and newer",
            torch.__version__,
            dtype,
            head_dim,
        )
        return None

    def hold(self, tensor: Tensor) -> Tensor:
        return tensor.contiguous().pin_memory()

    def capture(self, work: Callable[[], Tensor], beside: Graph | None = None) -> Graph | None:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self.where)
        recording = torch.cuda.graph(
            graph,
            None if beside is None else beside.memory,
            self._recording,
            capture_error_mode="thread_local",  # other threads stage weights, and may allocate
        )
        try:
            with recording:
                output = work()
        finally:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own
        return Graph(graph.replay, output, graph.pool())

    def _host_bytes(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def _copied(self, packed: Tensor) -> tuple[Tensor, Callable[[], None]]:
        host = self._host_bytes(len(packed)).copy_(packed, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(self.where))
        return host, done.synchronize


def local_device(setting: DeviceSetting = "auto") -> Device:
    """Return this process's device.

    Raises:
        ConfigError: a GPU is wanted, or there, and PyTorch can use none.
    """
    where = choose_device(setting)
    return CudaDevice(where) if where.type == "cuda" else Device(where)


def paged_varlen_attention() -> VarlenAttention | None:
    """The one of this torch, if it takes block tables and a number of splits."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    taken = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"block_table", "seqused_k", "num_splits"} <= taken.keys() else None


def packed_places(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Return the offset of each tensor in a packed copy, and the bytes of all."""
    places, size = [], 0
    for tensor in tensors:
        places.append(size)
        size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return places, size


def unpacked(packed: Tensor, places: Sequence[int], like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of a packed copy, which share its memory."""
    return [
        packed[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for place, tensor in zip(places, like, strict=True)
    ]
