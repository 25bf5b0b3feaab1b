"""A checksum that a GPU computes on its own memory: only 16 of 32768 bytes come to the host.

xxh3, which the CPU takes, is a chain: each KiB of its state depends on the one before, so on a GPU it has
no parallel form. This one is a multilinear hash (Lemire and Kaser, arXiv:1202.4961) in two levels:

    words   the bytes as little-endian int32 w, zeros behind the last one; a row has N = 8192 of them
    sums    of each row, twice: sum_i k[i] * w[i] mod 2**64, with two tables k of N fixed 64-bit numbers
    result  xxh3 (128 bits) of the number of bytes, as 8 bytes, and of all sums in order

Integer sums wrap and are associative, so every device comes to the same bits. A single word that differs
always changes both sums. Rows that differ anyhow have equal sums with a probability of at most 2**-66
over random tables (2**-128 where an odd number differs): k * d = c mod 2**64 has 2**v solutions, v < 32
being the trailing zeros of d. Order and length of the rows are xxh3's. As that is no proof against an
attacker, neither is this: the tables are public.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from functools import cache

import torch
import xxhash
from torch import Tensor

PREFIX = "multilinear:"
"""Prefix of a checksum's text, before 32 hexadecimal digits."""
ROW_WORDS = 8192
ROW_BYTES = 4 * ROW_WORDS
CHUNK_ROWS = {"cpu": 8}
"""Rows at a time: their products take four times as many bytes, and should fit into a cache."""
DEVICE_CHUNK_ROWS = 2048


def multilinear_checksums(tensors: Sequence[Tensor]) -> list[str]:
    """Return the checksum of each tensor's values; those of one device cost one copy to the host.

    Args:
        tensors: contiguous, of any type, all on one device.
    """
    flats = [_flat(tensor) for tensor in tensors]
    sums = [row_sums(flat) for flat in flats]
    if not sums:
        return []
    on_host = torch.cat(sums).cpu().numpy().astype("<i8", copy=False)
    checksums, row = [], 0
    for flat, of_tensor in zip(flats, sums, strict=True):
        digest = xxhash.xxh3_128(struct.pack("<q", flat.numel()))
        digest.update(on_host[row : row + len(of_tensor)].tobytes())
        checksums.append(PREFIX + digest.hexdigest())
        row += len(of_tensor)
    return checksums


def row_sums(flat: Tensor) -> Tensor:
    """Return the two sums of every row.

    Args:
        flat: [n] uint8.
    Returns:
        [ceil(n / ROW_BYTES), 2] int64 on the same device.
    """
    whole = flat.numel() // ROW_BYTES * ROW_BYTES
    if flat.storage_offset() % 4:  # words must begin where words may
        flat = flat.clone()
    sums = [_sums(chunk) for chunk in _chunks(flat[:whole])]
    if whole < flat.numel():
        last = torch.zeros(ROW_BYTES, dtype=torch.uint8, device=flat.device)
        last[: flat.numel() - whole].copy_(flat[whole:])
        sums.append(_sums(last))
    if not sums:
        return torch.empty(0, 2, dtype=torch.int64, device=flat.device)
    return torch.cat(sums)


def _chunks(flat: Tensor) -> Sequence[Tensor]:
    if not flat.numel():
        return ()
    return flat.split(CHUNK_ROWS.get(flat.device.type, DEVICE_CHUNK_ROWS) * ROW_BYTES)


def _sums(chunk: Tensor) -> Tensor:
    words = chunk.view(torch.int32).view(-1, ROW_WORDS)
    return torch.stack([(words * table).sum(1) for table in _tables(chunk.device)], 1)


@cache
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two times [ROW_WORDS] int64."""
    noise = hashlib.shake_256(b"headway multilinear checksum").digest(2 * 8 * ROW_WORDS)
    numbers = torch.frombuffer(bytearray(noise), dtype=torch.int64).to(device)
    return numbers[:ROW_WORDS], numbers[ROW_WORDS:]


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
