"""A model that follows another: the reference as a moving average of the policy."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def move_towards(target: Iterable[Tensor], source: Iterable[Tensor], eta: float) -> None:
    """`target ← eta · source + (1 - eta) · target`, in place, parameter by parameter.

    Args:
        eta: 0 leaves the target (a frozen reference), 1 copies the source.
    Raises:
        ValueError: eta outside of [0, 1]; another number of parameters.
    """
    if not 0.0 <= eta <= 1.0:
        raise ValueError(f"eta={eta}, wanted a share between 0 (frozen) and 1 (copy)")
    for old, new in zip(target, source, strict=True):
        old.lerp_(new.to(old.dtype), eta)
