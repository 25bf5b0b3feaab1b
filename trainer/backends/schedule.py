"""The learning rate over the versions of a run."""

from __future__ import annotations

import math
from collections.abc import Callable

from headway.contracts.config.optimizer import OptimizerConfig


def lr_factor(config: OptimizerConfig, total_steps: int) -> Callable[[int], float]:
    """Factor on the peak learning rate at a step: linear warm-up, then the shape down to the floor."""
    floor, warmup = config.min_lr_ratio, config.warmup_of(total_steps)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if config.schedule == "constant":
            return 1.0
        done = min(1.0, (step - warmup) / max(1, total_steps - warmup))
        shape = (
            1.0 - done if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        )
        return floor + (1.0 - floor) * shape

    return factor
