"""Weights from a trainer to a generator in its own process, one whole tensor at a time.

Nothing is stored or verified: both ends are one program. A tensor that is whole in the trainer's memory
is shared, and used in place; any other is copied into memory of the generator's own before the next one
is gathered, so that at most one extra tensor is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headway.contracts.errors import SyncError
from weight_sync.adapter import LORA_A, LORA_B, adapter_pairs
from weight_sync.manifest import Adapter

Keep = Literal["nothing", "frozen", "all"]
"""Copies that a generator keeps while it sleeps: nothing; `frozen`, what training does not change,
which then need not be sent again; or all memory, to be written to again.
"""


@dataclass(frozen=True, slots=True)
class TransferredTensor:
    """One parameter to transfer."""

    name: str
    """Name in the generator; A and B of an adapted module m: `m.lora_A.weight`, `m.lora_B.weight`."""
    tensor: Tensor
    """The whole parameter."""
    is_shared_memory: bool
    """True if it is the trainer's own memory, which nothing writes to until the generator sleeps.
    Otherwise it is valid until the next one is requested.
    """
    is_frozen: bool
    """True if training does not change it."""


class GeneratorWeights:
    """The weights of one generator: shared, or in buffers of its own."""

    def __init__(self, expected: Mapping[str, Tensor], device: torch.device) -> None:
        """
        Args:
            expected: the model's parameters, on the meta device.
            device: where they are wanted; `cuda` is this thread's.
        """
        self._expected = expected
        self._device = torch.empty(0, device=device).device
        """Device with its number, as in tensors."""
        self._own: dict[str, Tensor] = {}
        self._frozen: set[str] = set()

    @property
    def kept(self) -> frozenset[str]:
        """Names of those that need not be sent again."""
        return frozenset(self._frozen)

    @property
    def own_bytes(self) -> int:
        """Memory besides the trainer's."""
        return sum(tensor.nbytes for tensor in self._own.values())

    def take(
        self, parts: Iterable[TransferredTensor], adapter: Adapter | None
    ) -> dict[str, Tensor]:
        """All weights by name, those that were kept among them.

        Args:
            adapter: of the A and B that come; None if none do.
        Raises:
            SyncError: one is missing, unknown, twice there or of another shape.
        """
        placed = {name: self._own[name] for name in self.kept}
        for part in parts:
            if part.name in placed:
                raise SyncError(f"{part.name} was transferred twice; change rename, or skip one")
            placed[part.name] = self._place(part, adapter)
            del part  # the next one is gathered while nothing holds this one
        missing = sorted(self._expected.keys() - placed.keys())
        if missing:
            raise SyncError(
                f"{len(missing)} parameters of the generating model were not transferred, "
                f"{', '.join(missing[:3])} among them; is it the same model, and rename right?"
            )
        if adapter is not None:
            adapter_pairs({n: t for n, t in placed.items() if n not in self._expected}, adapter)
        return placed

    def release(self, keep: Keep) -> None:
        """Let go of buffers, and of the memory that was shared."""
        if keep == "nothing":
            self._frozen.clear()
        if keep != "all":
            self._own = {name: tensor for name, tensor in self._own.items() if name in self._frozen}

    def _place(self, part: TransferredTensor, adapter: Adapter | None) -> Tensor:
        shape, dtype = self._wanted(part.name, adapter)
        given = part.tensor.detach()
        if given.shape != shape:
            raise SyncError(
                f"{part.name} was transferred as {tuple(given.shape)}, the generating model has "
                f"{tuple(shape)}"
            )
        if part.is_shared_memory and (given.dtype, given.device) == (dtype, self._device):
            self._own.pop(part.name, None)
            return given
        buffer = self._own.get(part.name)
        if buffer is None:
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
        buffer.copy_(given)
        self._own[part.name] = buffer
        if part.is_frozen:
            self._frozen.add(part.name)
        return buffer

    def _wanted(self, name: str, adapter: Adapter | None) -> tuple[torch.Size, torch.dtype]:
        if name in self._expected:
            return self._expected[name].shape, self._expected[name].dtype
        for half, side in ((LORA_A, 1), (LORA_B, 0)):
            weight = self._expected.get(f"{name.removesuffix(half)}.weight")
            if adapter is not None and name.endswith(half) and weight is not None:
                size = (adapter.rank, weight.shape[1]) if side else (weight.shape[0], adapter.rank)
                return torch.Size(size), weight.dtype
        raise SyncError(
            f"{name} was transferred, which the generating model does not have; rename it, or skip it"
        )
