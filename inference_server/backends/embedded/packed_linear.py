"""Linear layers on the CPU over weights in the layout that products read fastest.

A plain weight is laid out again in every call; for the few rows of a decode step that costs as much
as the product. Laid out once, products of 1 to 32 rows take 0.4 to 0.8 of the time, for a second copy
of the weights in memory. Small float32 weights are stored column by column, which the BLAS reads as they
are; others in the layout of oneDNN's kernels. A CPU without kernels for a half type multiplies it four to
ten times as slowly as float32: there, weights are packed in float32, and only a layer's input and output
are rounded. A version is packed while it is staged, so a swap exchanges packed weights by pointer too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SMALLEST_BLOCKED = {torch.float32: 1 << 17, torch.bfloat16: 0}
"""Elements of a weight from which oneDNN's layout is the faster one: its calls cost 10 us more."""
Beside = Callable[[Sequence[tuple[str, int, int]], Tensor, Tensor], Tensor]
"""Takes modules side by side (name, start and size of its columns), the input and the output."""
ROWS = 32
"""Rows of a typical step: a hint for the layout."""


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this machine has packed products for a model of this type."""
    is_there = device.type == "cpu" and torch.backends.mkldnn.is_available()
    return is_there and dtype in DTYPES


def product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type in which this CPU multiplies packed weights of a type."""
    has_kernel = dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype if has_kernel else torch.float32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Weight and bias of one product."""

    weight: Tensor
    """In oneDNN's layout, or [out, in] column by column."""
    bias: Tensor | None
    """[out]."""
    is_blocked: bool
    """Whether it is in oneDNN's layout."""

    @staticmethod
    def of(weights: Sequence[Tensor], biases: Sequence[Tensor]) -> PackedWeight:
        """Those of linear layers with the same input, [out, in] each, side by side."""
        dtype = product_dtype(weights[0].dtype)
        weight = _side_by_side(weights).to(dtype)
        bias = _side_by_side(biases).to(dtype) if biases else None
        if weight.numel() >= SMALLEST_BLOCKED[weight.dtype]:
            blocked = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
            return PackedWeight(blocked, bias, is_blocked=True)
        return PackedWeight(weight.t().contiguous().t(), bias, is_blocked=False)

    def product(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        wide = x.to(self.weight.dtype)
        if not self.is_blocked:
            return linear(wide, self.weight, self.bias).to(x.dtype)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(
            wide, self.weight, self.bias, "none", [], ""
        )
        return output.to(x.dtype)


class Product:
    """The forward of a linear layer, or of several with the same input: their outputs side by side."""

    def __init__(self, layers: Sequence[nn.Linear], names: Mapping[int, str]) -> None:
        """
        Args:
            names: of the model's parameters, by their `id`.
        """
        self._weights = [names[id(layer.weight)] for layer in layers]
        sizes = [layer.out_features for layer in layers]
        self._parts = [
            (name.removesuffix(".weight"), sum(sizes[:at]), sizes[at])
            for at, name in enumerate(self._weights)
        ]
        self.beside: Beside | None = None
        """Adds what adapters give."""
        self._biases = [names[id(layer.bias)] for layer in layers if layer.bias is not None]
        self.packed: PackedWeight

    def pack(self, tensors: Mapping[str, Tensor]) -> PackedWeight | None:
        """Its part of a version, if that has it; callable on any thread."""
        if not tensors.keys() >= {*self._weights, *self._biases}:
            return None
        return PackedWeight.of(
            [tensors[name] for name in self._weights], [tensors[name] for name in self._biases]
        )

    def __call__(self, x: Tensor) -> Tensor:
        output = self.packed.product(x)
        return output if self.beside is None else self.beside(self._parts, x, output)


class PackedProducts:
    """Products over the weights of one version."""

    def __init__(self, products: Sequence[Product], model: nn.Module) -> None:
        self._products = products
        packed = self.pack({name: p.data for name, p in model.named_parameters()})
        for product in products:
            product.packed = packed[product]

    def pack(self, tensors: Mapping[str, Tensor]) -> dict[Product, PackedWeight]:
        """The weights of products among `tensors`, packed; callable on any thread."""
        with torch.no_grad():
            packed = {product: product.pack(tensors) for product in self._products}
        return {product: weight for product, weight in packed.items() if weight is not None}

    def put_beside(self, beside: Beside) -> None:
        """Have every product ask for what adapters give."""
        for product in self._products:
            product.beside = beside

    def exchange(self, packed: Mapping[Product, PackedWeight]) -> list[Tensor]:
        """Put packed weights in place; those that they replaced."""
        replaced = []
        for product, weight in packed.items():
            replaced.append(product.packed.weight)
            product.packed = weight
        return replaced


def packed_linears(model: nn.Module) -> PackedProducts:
    """Have every linear layer of a model compute with packed weights."""
    names = parameter_names(model)
    products = []
    for module in model.modules():
        if type(module) is nn.Linear:
            product = Product([module], names)
            module.forward = product  # type: ignore[method-assign, assignment]
            products.append(product)
    return PackedProducts(products, model)


def parameter_names(model: nn.Module) -> dict[int, str]:
    """The names of parameters by their `id`; of a tied one the first."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _side_by_side(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].detach() if len(tensors) == 1 else torch.cat(list(tensors))
