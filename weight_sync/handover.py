"""Weights from a trainer to a generator in its own process, one whole tensor at a time.

Nothing is stored or proven: both ends are one program. A tensor that lies whole in the trainer's memory
is lent, and used where it lies; any other is copied into memory of the generator's own before the next
one is gathered, so that no more than one is held besides.
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
"""What a generator goes on holding of its own copies while it sleeps: nothing; what training does not
change, which then need not come again; or all memory, to be written to again."""


@dataclass(frozen=True, slots=True)
class Handed:
    """One parameter on its way."""

    name: str
    """As the generator knows it; A and B of an adapted module m: `m.lora_A.weight`, `m.lora_B.weight`."""
    tensor: Tensor
    """All of it."""
    is_lent: bool
    """Whether it is the trainer's own memory, which nobody writes to until the generator sleeps. Else it
    is there until the next one is asked for."""
    is_frozen: bool
    """Whether training leaves it as it is."""


class HeldWeights:
    """The weights of one generator: lent, or in buffers of its own."""

    def __init__(self, expected: Mapping[str, Tensor], device: torch.device) -> None:
        """
        Args:
            expected: the model's parameters, on the meta device.
            device: where they are wanted.
        """
        self._expected = expected
        self._device = device
        self._own: dict[str, Tensor] = {}
        self._frozen: set[str] = set()

    @property
    def kept(self) -> frozenset[str]:
        """Those that need not come again."""
        return frozenset(self._frozen)

    @property
    def own_bytes(self) -> int:
        """Memory besides the trainer's."""
        return sum(tensor.nbytes for tensor in self._own.values())

    def take(self, parts: Iterable[Handed], adapter: Adapter | None) -> dict[str, Tensor]:
        """All weights by name, those that were kept among them.

        Args:
            adapter: of the A and B that come; None if none do.
        Raises:
            SyncError: one is missing, unknown, twice there or of another shape.
        """
        placed = {name: self._own[name] for name in self.kept}
        for part in parts:
            if part.name in placed:
                raise SyncError(f"{part.name} was handed over twice; change rename, or skip one")
            placed[part.name] = self._place(part, adapter)
            del part  # the next one is gathered while nothing holds this one
        missing = sorted(self._expected.keys() - placed.keys())
        if missing:
            raise SyncError(
                f"{len(missing)} parameters of the generating model were not handed over, "
                f"{', '.join(missing[:3])} among them; is it the same model, and rename right?"
            )
        if adapter is not None:
            adapter_pairs({n: t for n, t in placed.items() if n not in self._expected}, adapter)
        return placed

    def release(self, keep: Keep) -> None:
        """Let go of buffers, and of the memory that was lent."""
        if keep == "nothing":
            self._frozen.clear()
        if keep != "all":
            self._own = {name: tensor for name, tensor in self._own.items() if name in self._frozen}

    def _place(self, part: Handed, adapter: Adapter | None) -> Tensor:
        shape, dtype = self._wanted(part.name, adapter)
        given = part.tensor.detach()
        if given.shape != shape:
            raise SyncError(
                f"{part.name} was handed over as {tuple(given.shape)}, the generating model has "
                f"{tuple(shape)}"
            )
        if part.is_lent and (given.dtype, given.device) == (dtype, self._device):
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
            f"{name} was handed over, which the generating model does not have; rename it, or skip it"
        )
