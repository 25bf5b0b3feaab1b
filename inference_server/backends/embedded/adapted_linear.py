"""Linear layers with a low-rank adapter beside their weight: W x + scale · B (A x).

Not merged: the weight may be a trainer's, which must not be written to, and a merged copy costs memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.nn.functional import linear

from headway.contracts.errors import SyncError
from weight_sync.adapter import Pair


class AdaptedLinears:
    """The linear layers of one model that have an adapter now."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._layers: list[nn.Linear] = []

    def put_in(self, pairs: Mapping[str, Pair], scale: float) -> None:
        """Apply these adapters from now on, and no others.

        Args:
            pairs: module -> A [r, in], B [out, r].
        Raises:
            SyncError: a module is no linear layer; none takes part then.
        """
        self.take_out()
        layers = {name: self._model.get_submodule(name) for name in pairs}
        for name, layer in layers.items():
            if type(layer) is not nn.Linear:
                raise SyncError(
                    f"{name} is a {type(layer).__name__}; adapters are for linear layers"
                )
            a, b = pairs[name]
            layer.forward = _Adapted(layer, a, b, scale)  # type: ignore[method-assign, assignment]
            self._layers.append(layer)

    def take_out(self) -> None:
        """The layers are plain again."""
        for layer in self._layers:
            del layer.forward
        self._layers.clear()


class _Adapted:
    """The forward of one layer."""

    def __init__(self, layer: nn.Linear, a: Tensor, b: Tensor, scale: float) -> None:
        self._layer = layer
        self._a = a
        self._b = b
        self._scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        plain = linear(x, self._layer.weight, self._layer.bias)
        return plain + linear(linear(x, self._a), self._b) * self._scale
