"""The optimizer of an engine."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from headway.contracts.config.optimizer import OptimizerConfig


def make_optimizer(
    config: OptimizerConfig, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Build the optimizer that `type` selects.

    Args:
        parameters: those that are trained.
    """
    if config.type == "empty":
        return EmptyOptimizer()
    return torch.optim.AdamW(
        parameters,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=True,
    )


class EmptyOptimizer(torch.optim.Optimizer):
    """Holds one number, and changes no parameter."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(1)], {"lr": 0.0})

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Do nothing."""
