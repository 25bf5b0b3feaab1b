"""The gradient of a step as one vector, over all parameters and shards: its norm, and its clipping.

Squares are summed in float64. In float32 a sum over the millions of elements of an embedding loses
digits (4e-4 of the norm of 16 million on a CPU), and how many depends on how they are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK = 1 << 20
"""Elements of a gradient that are held in float64 at a time."""


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor], max_norm: float, sum_of_shards: Callable[[float], float]
) -> float:
    """Scale all gradients, in place, so that together they are no longer than `max_norm`; collective.

    Args:
        parameters: on each rank its shards; those without a gradient do not count.
        max_norm: as in `torch.nn.utils.clip_grad_norm_`, gradients shrink by max_norm / (norm + 1e-6).
        sum_of_shards: of a number of each rank, over the ranks that hold one copy together.
    Returns:
        The norm before. Where it is not finite, gradients are left as they are.
    """
    gradients = [_local(p.grad) for p in parameters if p.grad is not None]
    norm = math.sqrt(sum_of_shards(_sum_of_squares(gradients)))
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and math.isfinite(norm):
        torch._foreach_mul_(gradients, factor)
    return norm


def _local(gradient: Tensor) -> Tensor:
    """The shard of this rank, not a copy."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient


def _sum_of_squares(gradients: list[Tensor]) -> float:
    norms = [
        torch.linalg.vector_norm(chunk, dtype=torch.float64)
        for gradient in gradients
        for chunk in gradient.reshape(-1).split(CHUNK)
    ]
    return float(torch.stack(norms).square().sum()) if norms else 0.0
