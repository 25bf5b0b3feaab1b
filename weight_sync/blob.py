"""A blob: the stored bytes of some tensors, one after the other.

A blob of plain tensors is a safetensors file (https://github.com/huggingface/safetensors#format), so
a directory of full versions is what any engine loads. It is written here and not by the library, whose
serialisation copies everything once more and runs at 0.3 GiB/s; headers are padded so that the data
begins at a multiple of 64 bytes and a mapped tensor is aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weight_sync.codecs import Encoded
from weight_sync.manifest import TensorEntry, bytes_of, dtype_name

ALIGNMENT = 64
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Blob:
    """What is written, and what lies where in it."""

    name: str
    pieces: list[memoryview]
    entries: list[TensorEntry]

    @property
    def num_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


def make_blob(number: int, tensors: Sequence[tuple[str, torch.Tensor, Encoded]]) -> Blob:
    """The n-th blob of a version: `(name, values, as stored)` of its tensors."""
    if all(encoded.codec == "raw" for _, _, encoded in tensors):
        return _safetensors_blob(f"shard-{number:05d}.safetensors", tensors)
    return _packed_blob(f"delta-{number:05d}.bin", tensors)


def _safetensors_blob(name: str, tensors: Sequence[tuple[str, torch.Tensor, Encoded]]) -> Blob:
    # Wide types first, so that every tensor is aligned to its own type.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor_name, tensor, encoded in ordered:
        end = offset + encoded.payload.nbytes
        header[tensor_name] = {
            "dtype": SAFETENSORS_DTYPES[dtype_name(tensor.dtype)],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    head = struct.pack("<Q", len(text)) + text
    return _blob(name, [memoryview(head)], ordered, pads=False)


def _packed_blob(name: str, tensors: Sequence[tuple[str, torch.Tensor, Encoded]]) -> Blob:
    return _blob(name, [], tensors, pads=True)


def _blob(
    name: str,
    pieces: list[memoryview],
    tensors: Sequence[tuple[str, torch.Tensor, Encoded]],
    pads: bool,
) -> Blob:
    offset = sum(piece.nbytes for piece in pieces)
    entries = []
    for tensor_name, tensor, encoded in tensors:
        payload = bytes_of(encoded.payload)
        entries.append(
            TensorEntry(
                name=tensor_name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                checksum=encoded.checksum,
                blob=name,
                offset=offset,
                size=payload.nbytes,
                codec=encoded.codec,
            )
        )
        padding = -payload.nbytes % ALIGNMENT if pads else 0
        pieces += [payload, memoryview(bytes(padding))]
        offset += payload.nbytes + padding
    return Blob(name, [piece for piece in pieces if piece.nbytes], entries)
