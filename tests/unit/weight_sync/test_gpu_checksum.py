"""The checksum of devices: against arithmetic in Python, and against every kind of damage."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest
import torch
import xxhash

from weight_sync.gpu_checksum import (
    PREFIX,
    ROW_BYTES,
    ROW_WORDS,
    _tables,
    multilinear_checksums,
)
from weight_sync.manifest import tensor_checksum

SIZES = (0, 1, 3, 4, ROW_BYTES - 1, ROW_BYTES, ROW_BYTES + 5, 20 * ROW_BYTES + 2)


def noise(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def checksum(tensor: torch.Tensor) -> str:
    return multilinear_checksums([tensor])[0]


def slow(content: bytes) -> str:
    """As the module's text has it, with Python's integers."""
    table = struct.unpack(
        f"<{2 * ROW_WORDS}q",
        hashlib.shake_256(b"headway multilinear checksum").digest(16 * ROW_WORDS),
    )
    digest = xxhash.xxh3_128(struct.pack("<q", len(content)))
    for start in range(0, len(content), ROW_BYTES):
        row = content[start : start + ROW_BYTES].ljust(ROW_BYTES, b"\0")
        words = struct.unpack(f"<{ROW_WORDS}i", row)
        for half in (table[:ROW_WORDS], table[ROW_WORDS:]):
            total = sum(k * w for k, w in zip(half, words, strict=True)) % 2**64
            digest.update(struct.pack("<Q", total))
    return PREFIX + digest.hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_the_formula_says(size: int) -> None:
    content = noise(size)
    assert checksum(content) == slow(content.numpy().tobytes())


def test_types_and_shapes_are_not_its_business_and_many_at_once_are_as_one_each() -> None:
    values = torch.randn(3, 5, 7)
    flat = values.reshape(-1).view(torch.uint8)
    assert checksum(values) == checksum(flat) == checksum(values.reshape(-1))
    assert multilinear_checksums([]) == []
    many = [noise(size, size) for size in SIZES]
    assert multilinear_checksums(many) == [checksum(one) for one in many]


def test_where_it_begins_in_memory_does_not_count() -> None:
    content = noise(ROW_BYTES + 8)
    for shift in range(1, 5):
        shifted = torch.cat([torch.zeros(shift, dtype=torch.uint8), content])[shift:]
        assert checksum(shifted) == checksum(content)


def test_every_flipped_bit_swap_zero_and_length_changes_it() -> None:
    content = noise(2 * ROW_BYTES + 40)
    found = {checksum(content)}
    damaged = []
    for at, bit in itertools.product((0, 3, 7, ROW_BYTES, len(content) - 1), range(8)):
        damaged.append(content.clone())
        damaged[-1][at] ^= 1 << bit
    for first, second in ((3, 7), (3, ROW_BYTES + 3), (7, 4095)):  # signs, which xor would cancel
        damaged.append(content.clone())
        damaged[-1][[first, second]] ^= 128
    swapped = content.clone()
    swapped[:ROW_BYTES], swapped[ROW_BYTES : 2 * ROW_BYTES] = (
        content[ROW_BYTES : 2 * ROW_BYTES],
        content[:ROW_BYTES],
    )
    words = content.clone()
    words[:4], words[4:8] = content[4:8], content[:4]
    zeroed = content.clone()
    zeroed[4096:8192] = 0
    longer = torch.cat([content, torch.zeros(1, dtype=torch.uint8)])
    damaged += [swapped, words, zeroed, longer, content[:-1], content[1:]]
    found |= {checksum(one) for one in damaged}
    assert len(found) == len(damaged) + 1


def test_no_number_of_a_table_lets_a_single_word_change_unseen() -> None:
    # 2**64 divides k * d for a d below 2**32 only if 2**33 divides k.
    assert all((table % 2**33 != 0).all() for table in _tables(torch.device("cpu")))


def test_it_is_told_apart_from_the_checksum_of_hosts() -> None:
    assert checksum(noise(9)).startswith(PREFIX)
    assert not tensor_checksum(noise(9)).startswith(PREFIX)
