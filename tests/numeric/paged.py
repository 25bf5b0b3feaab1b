"""The paged path of the embedded engine on the CPU: the kernel of `varlen_attn` as slow loops, and graphs
that are tapes of operations on the memory that they were recorded with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from inference_server.backends.embedded import paged_cache
from inference_server.backends.embedded.device import Accelerator, Graph, VarlenAttention
from tests import varlen_double

CALLS: list[tuple[tuple[int, ...], ...]] = []
"""Shapes of queries, keys and block table of every call of the kernel."""


def _paged(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool = False,
    scale: float | None = None,
    window_size: list[int] | None = None,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """FlashAttention 2 over paged keys and values, in float64, refusing what the kernel refuses."""
    assert block_table is not None and seqused_k is not None and cu_seq_k is not None
    block_size = key.shape[1]
    assert block_size % paged_cache.BLOCK_SIZE == 0 and query.shape[-1] <= 256 and num_splits == 1
    assert query.dtype == key.dtype == value.dtype and query.stride(-1) == 1
    assert {t.dtype for t in (cu_seq_q, cu_seq_k, seqused_k, block_table)} == {torch.int32}
    assert len(cu_seq_q) == len(cu_seq_k) == len(seqused_k) + 1 == len(block_table) + 1
    assert cu_seq_q[-1] == len(query) and window_size is not None and window_size[1] == 0
    CALLS.append((tuple(query.shape), tuple(key.shape), tuple(block_table.shape)))
    output = torch.full_like(query, float("nan"))
    for row, used in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[row].item(), cu_seq_q[row + 1].item()
        assert last - first <= max_q and used <= max_k and used <= block_table.shape[1] * block_size
        blocks = block_table[row, : -(-used // block_size)]
        k, v = (cache[blocks].flatten(0, 1)[:used].double() for cache in (key, value))
        groups = query.shape[1] // key.shape[2]
        assert groups == 1 or enable_gqa
        k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", query[first:last].double(), k)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        behind = torch.arange(used - last + first, used)[:, None] - torch.arange(used)
        allowed = behind >= 0
        if window_size[0] >= 0:
            allowed &= behind <= window_size[0]
        shares = torch.softmax(scores.masked_fill(~allowed, float("-inf")), -1)
        output[first:last] = torch.einsum("hqk,khd->qhd", shares, v).to(query.dtype)
    return output, torch.empty(0), torch.empty(0)


varlen_double.install(_paged)


class Tape(TorchDispatchMode):
    """Operations, and the memory that they read and wrote: what a CUDA graph is."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        held = tree_map(_same_memory, (args, kwargs or {}))
        self._steps.append((func, *held, tree_map(_same_memory, result)))
        return result

    def replay(self) -> None:
        """Do them again, with the same memory."""
        for func, args, kwargs, result in self._steps:
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(result)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)


def _same_memory(leaf: Any) -> Any:
    """A parameter that is given other memory later is not what a graph reads."""
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


class PagedCpu(Accelerator):
    """The CPU as if it were a GPU with FlashAttention for every type."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.num_graphs = 0
        self.num_replays = 0

    def varlen_attention(self, dtype: torch.dtype, head_dim: int) -> VarlenAttention | None:
        return varlen.varlen_attn

    def capture(self, work: Callable[[], Tensor], beside: Graph | None = None) -> Graph | None:
        self.num_graphs += 1
        tape = Tape()
        with tape:
            output = work()

        def replay() -> None:
            self.num_replays += 1
            tape.replay()

        return Graph(replay, output)
