"""Copies between the host and a GPU that neither waits for."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device.

    From the host to a GPU the copy is queued behind the GPU's work, through pinned memory: a pageable
    copy would make the host wait for all that is queued.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    staged = tensor.pin_memory() if device.type == "cuda" and tensor.numel() else tensor
    return staged.to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy on the host, in pinned memory; its values are there after `finish_copies`."""
    return tensor.to("cpu", non_blocking=True)


def finish_copies(device: torch.device) -> None:
    """Wait for what `to_host` began."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
