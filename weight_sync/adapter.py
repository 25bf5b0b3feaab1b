"""Low-rank adapters as versions (LoRA, arXiv:2106.09685): W' = W + (alpha / rank) · B · A."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from headway.contracts.errors import SyncError
from weight_sync.manifest import Adapter

LORA_A = ".lora_A.weight"
LORA_B = ".lora_B.weight"


def merge_adapter(
    tensors: Mapping[str, torch.Tensor],
    adapter: Adapter,
    read_base: Callable[[str], torch.Tensor],
    expected: Mapping[str, torch.Size],
) -> dict[str, torch.Tensor]:
    """The weights of the model with an adapter merged in.

    Args:
        tensors: `<module>.lora_A.weight` [r, in] and `<module>.lora_B.weight` [out, r].
        read_base: a tensor of the base by name.
        expected: the model's parameters; those without an adapter are the base's own tensors.
    Raises:
        SyncError: a module that the model has not, or one half of a pair.
    """
    raise SyncError("adapters are not there yet")
