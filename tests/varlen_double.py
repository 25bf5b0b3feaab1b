"""PyTorch's `varlen_attn` where there is no FlashAttention: the function itself, its checks and its
derivative, over slow loops on the CPU that cut the pack where `cu_seq_q` says.

An operator has one kernel in a process. Calls with a block table go to the one that is installed for
them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import varlen

CALLS: list[tuple[tuple[int, ...], int]] = []
"""Of each forward: shape of the query, number of sequences."""


_PAGED: list[Callable[..., tuple[Tensor, Tensor, Tensor]]] = []


def install(paged: Callable[..., tuple[Tensor, Tensor, Tensor]] | None = None) -> None:
    """Give the operators of `varlen_attn` kernels on the CPU, for the life of this process.

    Args:
        paged: takes the calls with a block table.
    """
    if paged is not None:
        _PAGED[:] = [paged]
    _register()


@cache
def _register() -> None:
    varlen._varlen_attn.register_kernel("cpu")(_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(_backward)


def _check(tensors: list[Tensor], offsets: Tensor, longest: int, window: Any) -> None:
    """What the kernel of a GPU wants."""
    query, key, value = tensors[:3]
    assert all(t.stride(-1) == 1 for t in tensors)
    assert len({t.dtype for t in tensors}) == 1
    assert key.shape == value.shape and query.shape[1] % key.shape[1] == 0
    assert offsets.dtype == torch.int32 and offsets.is_contiguous()
    lengths = offsets.diff().tolist()
    assert offsets[0] == 0 and offsets[-1] == len(query) == len(key)
    assert longest == max(lengths) and list(window) == [-1, 0]


def _grouped(tensor: Tensor, groups: int) -> Tensor:
    """[L, kv_heads, D] -> [heads, L, D] in at least float32."""
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    return wide.repeat_interleave(groups, 1).transpose(0, 1)


def _weights(query: Tensor, key: Tensor, scale: float | None) -> tuple[Tensor, Tensor, float]:
    """[heads, L, L] causal softmax, [heads, L] logarithm of its norm, and the scale."""
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = query @ key.transpose(1, 2) * factor
    is_later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(is_later, -torch.inf)
    norms = scores.logsumexp(-1)
    return (scores - norms[..., None]).exp(), norms, factor


def _forward(
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
    if block_table is not None:
        return _PAGED[0](
            *(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, scale, window_size),
            *(enable_gqa, seqused_k, block_table, num_splits),
        )
    _check([query, key, value], cu_seq_q, max_q, window_size)
    assert is_causal and max_k == max_q and cu_seq_k is not None and cu_seq_k.equal(cu_seq_q)
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa or groups == 1
    CALLS.append((tuple(query.shape), len(cu_seq_q) - 1))
    out, norms = torch.empty_like(query), torch.empty(query.shape[1], len(query))
    for start, end in pairwise(cu_seq_q.tolist()):
        q = _grouped(query[start:end], 1)
        k, v = (_grouped(tensor[start:end], groups) for tensor in (key, value))
        weights, norms[:, start:end], _ = _weights(q, k, scale)
        out[start:end] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out, norms, torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    is_causal: bool,
    rng_state: Tensor,
    scale: float | None = None,
    window_size: list[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    _check([query, key, value, out, grad_out], cu_seq_q, max_q, window_size)
    groups = query.shape[1] // key.shape[1]
    grads = tuple(torch.empty_like(tensor) for tensor in (query, key, value))
    for start, end in pairwise(cu_seq_q.tolist()):
        part = slice(start, end)
        q, o, d = (_grouped(tensor[part], 1) for tensor in (query, out, grad_out))
        k, v = (_grouped(tensor[part], groups) for tensor in (key, value))
        weights, _, factor = _weights(q, k, scale)
        slopes = weights * (d @ v.transpose(1, 2) - (d * o).sum(-1, keepdim=True)) * factor
        whole = (slopes @ k, slopes.transpose(1, 2) @ q, weights.transpose(1, 2) @ d)
        for grad, values, members in zip(grads, whole, (1, groups, groups), strict=True):
            summed = values.unflatten(0, (-1, members)).sum(1)
            grad[part] = summed.transpose(0, 1).to(grad.dtype)
    return grads
