"""Parameters and optimizer state, moved between a device and the CPU's memory."""

from __future__ import annotations

import torch
from torch import Tensor


def move_parameters(model: torch.nn.Module, device: torch.device) -> None:
    """Move parameters and buffers in place; gradients are dropped."""
    for parameter in model.parameters():
        parameter.grad = None
    model.to(device)


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Move what the optimizer keeps of each parameter."""
    for kept in optimizer.state.values():
        for name, value in kept.items():
            if isinstance(value, Tensor):
                kept[name] = value.to(device)
