"""Pieces of a blob: written, checksummed and looked through for NaN in one pass over the memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from weight_sync.gpu_checksum import PREFIX
from weight_sync.manifest import bytes_of, has_checksum

CHUNK_BYTES = 1 << 20
"""Fits a core's cache."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes that are written one after the other, with one checksum."""

    data: memoryview
    values: torch.Tensor | None = None
    """[n] the numbers that these bytes are; None of a header, of padding, of what is encoded."""

    @classmethod
    def of_values(cls, tensor: torch.Tensor) -> Piece:
        """Return the values of a CPU tensor; not copied if they are contiguous."""
        flat = tensor.detach().contiguous().view(-1)
        return cls(bytes_of(flat), flat)


@dataclass(frozen=True, slots=True)
class Written:
    """What one pass over a piece found."""

    checksum: str
    is_finite: bool
    """False if a value is NaN or infinite, and rarely because their sum overflows."""


def write_checked(pieces: Sequence[Piece], write: Callable[[memoryview], object]) -> list[Written]:
    """Write all pieces; take checksum and sum of each chunk right after it was touched."""
    found = []
    for piece in pieces:
        checksum = xxhash.xxh3_128()
        total = 0.0
        for start in range(0, piece.data.nbytes, CHUNK_BYTES):
            chunk = piece.data[start : start + CHUNK_BYTES]
            write(chunk)
            checksum.update(chunk)
            if piece.values is not None:
                size = piece.values.element_size()
                total += sum_of(piece.values[start // size : (start + CHUNK_BYTES) // size]).item()
        found.append(Written(checksum.hexdigest(), math.isfinite(total)))
    return found


def look_through(tensor: torch.Tensor, checksum: str) -> tuple[bool, bool]:
    """Return whether the values have this checksum, and whether they are known to be finite."""
    if tensor.is_cpu and not checksum.startswith(PREFIX):
        (found,) = write_checked([Piece.of_values(tensor)], len)
        return found.checksum == checksum, found.is_finite
    return has_checksum(tensor, checksum), False


def sum_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, which is not finite if a value is not."""
    # Types of 8 bits have no sum of their own.
    return tensor.sum(dtype=torch.float32 if tensor.element_size() == 1 else None)
