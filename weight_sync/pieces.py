"""Pieces of a blob: written, checksummed and looked through for NaN in one pass over the memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from weight_sync.gpu_checksum import PREFIX
from weight_sync.manifest import bytes_of, has_checksum

CHUNK_BYTES = 1 << 20
"""A chunk of the source fits a core's cache. The C library copies one of this size past the cache, an
eighth faster than half of it: such a copy does not first read what it is about to overwrite."""
_INFINITY = {
    torch.float64: 0x7FF0000000000000,
    torch.float32: 0x7F800000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
}
"""Bits of +infinity. Positive numbers are ordered as their bits are, and NaN is beyond infinity."""
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


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
    """False if a value is NaN or infinite."""


class _Numbers:
    """Looks for numbers that are not finite, by their bits.

    On this thread alone: a sum over several waits for cores that the other end of a transfer needs.
    """

    def __init__(self, values: torch.Tensor | None) -> None:
        self._signed: NDArray[Any] | None = None
        infinity = None if values is None else _INFINITY.get(values.dtype)
        if values is None or infinity is None:
            return
        self._size = values.element_size()
        self._signed = values.view(_BITS[self._size]).numpy()
        self._unsigned = self._signed.view(f"u{self._size}")
        self._positive = infinity
        self._negative = infinity | 1 << (8 * self._size - 1)

    def are_finite(self, start: int, end: int) -> bool:
        """True if all between these two bytes are."""
        if self._signed is None:
            return True
        part = slice(start // self._size, end // self._size)
        unsigned = self._unsigned[part]
        if int(np.bitwise_or.reduce(unsigned)) & self._positive != self._positive:
            return True  # a bit that each infinity and NaN has is in none, as where all are below 2
        largest = int(self._signed[part].max(initial=0))
        return largest < self._positive and int(unsigned.max(initial=0)) < self._negative


def write_checked(pieces: Sequence[Piece], write: Callable[[memoryview], object]) -> list[Written]:
    """Write all pieces; each chunk right after its checksum brought it into the cache.

    In this order, checksum and look cost a tenth more than the copy and a checksum behind it.
    """
    found = []
    for piece in pieces:
        checksum = xxhash.xxh3_128()
        numbers = _Numbers(piece.values)
        is_finite = True
        for start in range(0, piece.data.nbytes, CHUNK_BYTES):
            chunk = piece.data[start : start + CHUNK_BYTES]
            checksum.update(chunk)
            is_finite = is_finite and numbers.are_finite(start, start + CHUNK_BYTES)
            write(chunk)
        found.append(Written(checksum.hexdigest(), is_finite))
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
