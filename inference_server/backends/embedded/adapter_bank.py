"""Adapters side by side over one base: W x + scale · B (A x), for each token with its own A and B.

Source: LoRA, arXiv:2106.09685; serving many at once, arXiv:2311.03285.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from headway.contracts.adapters import not_loaded
from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion
from inference_server.backends.embedded.attention import Span
from inference_server.backends.embedded.packed_linear import PackedProducts
from weight_sync.adapter import adapter_pairs, check_adapter, scale_of
from weight_sync.manifest import Adapter
from weight_sync.model_size import decoder_layers

Part = tuple[str, int, int]
"""A module's name, and where its columns lie in the output of a product: start and size."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """One version of an adapter, ready to compute."""

    version: PolicyVersion
    pairs: Mapping[str, tuple[Tensor, Tensor]]
    """Module -> A [r, in], scale · B [out, r], of the model's type and on its device."""


class AdapterBank:
    """The adapters of one model; used by the engine's thread, except for `prepare`."""

    def __init__(self, model: nn.Module, packed: PackedProducts | None) -> None:
        """
        Args:
            packed: the products of the model's linear layers, if they are packed.
        """
        self._packed = packed
        inside = {id(module) for layer in decoder_layers(model) for module in layer.modules()}
        self._linears = {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear and id(module) in inside
        }
        self._held: dict[str, LoadedAdapter] = {}
        self._active: list[tuple[LoadedAdapter, Tensor | None]] = []
        """Adapters of the current step, each with the places of its tokens; None is all of them."""
        self._is_wired = False

    @property
    def versions(self) -> dict[str, PolicyVersion]:
        """Version of each adapter, by name."""
        return {name: adapter.version for name, adapter in self._held.items()}

    @property
    def is_active(self) -> bool:
        """True if the current step has tokens of an adapter."""
        return bool(self._active)

    def version(self, name: str) -> PolicyVersion:
        """Return the version of an adapter.

        Raises:
            DataError: it is not loaded.
        """
        if name not in self._held:
            raise not_loaded(name, self._held)
        return self._held[name].version

    def prepare(
        self, tensors: Mapping[str, Tensor], adapter: Adapter, version: PolicyVersion
    ) -> LoadedAdapter:
        """Bring an adapter into the form of this model; callable on any thread.

        Args:
            tensors: named as `peft` saves them.
        Raises:
            SyncError: it is no plain LoRA, or does not fit the model.
        """
        check_adapter(adapter)
        scale = scale_of(adapter)
        pairs = {}
        for module, (a, b) in adapter_pairs(tensors, adapter).items():
            layer = self._linears.get(module)
            if layer is None:
                raise SyncError(
                    f"the adapter changes {module}, which is no linear layer inside of this model's "
                    "blocks; publish it merged, as a version"
                )
            if (b.shape[0], a.shape[1]) != (layer.out_features, layer.in_features):
                raise SyncError(
                    f"the adapter of {module} makes {b.shape[0]} x {a.shape[1]}, the model has "
                    f"{layer.out_features} x {layer.in_features}"
                )
            like = layer.weight
            pairs[module] = (a.to(like), (b.float() * scale).to(like))
        if not pairs:
            raise SyncError("the adapter has no matrices; it would change nothing")
        return LoadedAdapter(version, pairs)

    def put(self, name: str, adapter: LoadedAdapter) -> None:
        """Compute with it from the next step on."""
        if not self._is_wired:
            self._wire()
        self._held[name] = adapter

    def drop(self, name: str) -> None:
        """Forget an adapter; no sequence uses it."""
        self._held.pop(name, None)

    def begin(self, spans: Sequence[Span]) -> None:
        """Begin a step.

        Args:
            spans: in the order of its tokens.
        """
        self._active = []
        if not any(span.row.adapter for span in spans):
            return
        places: dict[str, list[int]] = {}
        num_tokens = 0
        for span in spans:
            end = num_tokens + span.end - span.start
            if span.row.adapter:
                places.setdefault(span.row.adapter, []).extend(range(num_tokens, end))
            num_tokens = end
        for name, own in places.items():
            adapter = self._held[name]
            device = next(iter(adapter.pairs.values()))[0].device
            index = None if len(own) == num_tokens else torch.tensor(own, device=device)
            self._active.append((adapter, index))

    def add(self, parts: Sequence[Part], x: Tensor, output: Tensor) -> Tensor:
        """Add what the adapters of this step give to the output of a product.

        Args:
            parts: modules side by side.
            x: [..., T, in]; output: [..., T, out], changed in place.
        """
        for adapter, index in self._active:
            for name, start, size in parts:
                pair = adapter.pairs.get(name)
                if pair is None:
                    continue
                mine = x if index is None else x.index_select(-2, index)
                change = linear(linear(mine, pair[0]), pair[1])
                target = output.narrow(-1, start, size)
                if index is None:
                    target += change
                else:
                    target.index_add_(-2, index, change)
        return output

    def _wire(self) -> None:
        """Have products ask for adapters; a server without any pays nothing."""
        self._is_wired = True
        if self._packed is not None:
            self._packed.put_beside(self.add)
            return
        for name, layer in self._linears.items():
            layer.forward = _Beside(self, name, layer)  # type: ignore[method-assign, assignment]


class _Beside:
    """The forward of one linear layer that is not packed."""

    def __init__(self, bank: AdapterBank, name: str, layer: nn.Linear) -> None:
        self._bank = bank
        self._layer = layer
        self._parts = [(name, 0, layer.out_features)]

    def __call__(self, x: Tensor) -> Tensor:
        plain = linear(x, self._layer.weight, self._layer.bias)
        return self._bank.add(self._parts, x, plain)
