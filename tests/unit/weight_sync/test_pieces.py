"""One pass over a piece finds what a checksum and a look at every value would."""

from __future__ import annotations

import pytest
import torch

from weight_sync.manifest import tensor_checksum
from weight_sync.pieces import CHUNK_BYTES, Piece, look_through, write_checked


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("more", [-1, 0, 1, CHUNK_BYTES])
@pytest.mark.parametrize("bad", [None, float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_checksum_and_finiteness_of_a_piece(dtype: torch.dtype, more: int, bad: float | None):
    size = torch.empty(0, dtype=dtype).element_size()
    tensor = torch.arange(CHUNK_BYTES // size + more).sin().to(dtype)
    if bad is not None:
        tensor[-1] = bad
    chunks: list[bytes] = []
    head = Piece(memoryview(b"head"))
    first, second = write_checked(
        [head, Piece.of_values(tensor)], lambda chunk: chunks.append(bytes(chunk))
    )
    assert b"".join(chunks) == b"head" + tensor.view(torch.uint8).numpy().tobytes()
    assert first.is_finite
    assert second.checksum == tensor_checksum(tensor)
    assert second.is_finite is (bad is None)
    assert look_through(tensor, second.checksum) == (True, bad is None)
    assert not look_through(tensor, first.checksum)[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_is_told_from_what_is_none(dtype: torch.dtype):
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for number, is_finite in zip(every, every.float().isfinite().tolist(), strict=True):
        assert write_checked([Piece.of_values(number[None])], len)[0].is_finite is is_finite


def test_integers_are_finite():
    (found,) = write_checked([Piece.of_values(torch.arange(-3, 3))], len)
    assert found.is_finite


def test_nothing_is_finite_and_has_a_checksum():
    (found,) = write_checked([Piece.of_values(torch.empty(0, 3))], len)
    assert found.is_finite
    assert found.checksum == tensor_checksum(torch.empty(0))
