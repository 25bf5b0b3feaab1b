"""The gradient of a step as one vector, over all parameters and shards: its norm, and its clipping.

Squares are summed in float64. In float32 a sum over the millions of elements of an embedding loses
digits (4e-4 of the norm of 16 million on a CPU), and how many depends on how they are sharded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

CHUNK = 1 << 20
"""Elements of a gradient that are held in float64 at a time."""
GPU_CHUNK = 1 << 24
"""Elements of a chunk on a GPU, where every chunk is a few launches."""


@torch.no_grad()
def sum_of_squares(parameters: Iterable[Tensor]) -> Tensor:
    """Sum the squares of all gradients of this rank, where they are and without waiting for them.

    Args:
        parameters: on each rank its shards; those without a gradient do not count.
    Returns:
        [] float64. The norm is the root of this, summed over the ranks that hold one copy together.
    """
    norms = [
        torch.linalg.vector_norm(chunk, dtype=torch.float64)
        for gradient in _gradients(parameters)
        for chunk in gradient.reshape(-1).split(GPU_CHUNK if gradient.is_cuda else CHUNK)
    ]
    return torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=torch.float64)


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], max_norm: float, norm: float) -> None:
    """Scale all gradients, in place, so that together they are no longer than `max_norm`.

    Args:
        max_norm: as in `torch.nn.utils.clip_grad_norm_`, gradients shrink by max_norm / (norm + 1e-6).
        norm: of all of them, over all shards. Where it is not finite, they are left as they are.
    """
    factor = max_norm / (norm + 1e-6)
    if factor < 1.0 and math.isfinite(norm):
        scale_gradients(parameters, factor)


@torch.no_grad()
def scale_gradients(parameters: Iterable[Tensor], factor: float) -> None:
    """Multiply all gradients, in place."""
    torch._foreach_mul_(_gradients(parameters), factor)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The shards of this rank, not copies."""
    found = [p.grad for p in parameters if p.grad is not None]
    return [grad.to_local() if isinstance(grad, DTensor) else grad for grad in found]
