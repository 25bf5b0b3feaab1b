"""Linear layers on the CPU over weights in the layout of oneDNN's kernels.

A plain weight is laid out anew in every call; for the few rows of a decode step that costs as much
as the product. Packed once, float32 and bfloat16 products of 1 to 32 rows take 0.4 to 0.8 of the
time, for a second copy of the weights in memory. A version is packed while it is staged, so that a
swap exchanges packed weights by pointer too.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16)
SMALLEST = 1 << 17
"""Elements of a weight; below, the call costs more than the layout."""
ROWS = 32
"""Rows of a typical step: a hint for the layout."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has packed products of this type."""
    return (
        device.type == "cpu"
        and dtype in DTYPES
        and torch.backends.mkldnn.is_available()
        and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinears:
    """The linear layers of one model."""

    def __init__(self, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._layers: dict[str, list[_Packed]] = {}
        for module in model.modules():
            if type(module) is nn.Linear and module.weight.numel() >= SMALLEST:
                layer = _Packed(module)
                module.forward = layer  # type: ignore[method-assign, assignment]
                self._layers.setdefault(names[id(module.weight)], []).append(layer)
        self.exchange(self.pack({name: p[0].weight for name, p in self._layers.items()}))

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of linear layers among `tensors`, packed; callable on any thread."""
        with torch.no_grad():
            return {
                name: torch.ops.mkldnn._reorder_linear_weight(tensors[name].detach(), ROWS)
                for name in self._layers.keys() & tensors.keys()
            }

    def exchange(self, packed: Mapping[str, Tensor]) -> list[Tensor]:
        """Put packed weights in place; those that they replaced."""
        replaced = []
        for name, weight in packed.items():
            for layer in self._layers[name]:
                replaced.append(layer.weight)
                layer.weight = weight
        return replaced


class _Packed:
    """The forward of one layer."""

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        self.weight = layer.weight.data
        """Packed, once `exchange` has put it in place."""

    def __call__(self, x: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self._layer.bias, "none", [], ""
        )
        return output
