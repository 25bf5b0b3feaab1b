"""A blob: the stored bytes of some tensors, one after the other.

A blob of plain tensors is a safetensors file (https://github.com/huggingface/safetensors#format), so
a directory of full versions is what any engine loads. It is written here and not by the library, whose
serialisation copies everything once more and runs at 0.3 GiB/s; headers are padded so that the data
begins at a multiple of 64 bytes and a mapped tensor is aligned.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from headway.contracts.errors import SyncError
from weight_sync.codecs import Encoded
from weight_sync.manifest import Manifest, TensorEntry, bytes_of, dtype_name
from weight_sync.pieces import Piece, Written
from weight_sync.store import BlobReader

ALIGNMENT = 64
MAX_HEADER_BYTES = 100 << 20
NO_CHECKSUM = "0" * 32
ADAPTER_NAME = "adapter_model.safetensors"
SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True, slots=True)
class Blob:
    """Bytes to write as one blob, and the position of each tensor in them."""

    name: str
    pieces: list[Piece]
    tensors: Sequence[tuple[str, torch.Tensor, Encoded]]
    places: list[tuple[int, int]]
    """For each tensor, its piece and the offset of that piece."""

    def is_finite(self, written: Sequence[Written]) -> bool:
        """True if every value was seen to be finite while the pieces were written."""
        return all(
            encoded.codec == "raw" and written[piece].is_finite
            for (_, _, encoded), (piece, _) in zip(self.tensors, self.places, strict=True)
        )

    def entries(self, written: Sequence[Written]) -> list[TensorEntry]:
        """Return the tensors' entries in the manifest, once the pieces were written."""
        return [
            TensorEntry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                checksum=written[piece].checksum if encoded.codec == "raw" else encoded.checksum,
                blob=self.name,
                offset=offset,
                size=encoded.payload.nbytes,
                codec=encoded.codec,
                is_finite=encoded.codec == "raw" and written[piece].is_finite,
            )
            for (name, tensor, encoded), (piece, offset) in zip(
                self.tensors, self.places, strict=True
            )
        ]


def plain(tensor: torch.Tensor) -> Encoded:
    """Return a tensor as it is; its checksum is computed when it is written."""
    return Encoded("raw", tensor, NO_CHECKSUM)


def make_blob(number: int, tensors: Sequence[tuple[str, torch.Tensor, Encoded]]) -> Blob:
    """The n-th blob of a version: `(name, values, as stored)` of its tensors."""
    if all(encoded.codec == "raw" for _, _, encoded in tensors):
        return _safetensors_blob(f"shard-{number:05d}.safetensors", tensors)
    return _packed_blob(f"delta-{number:05d}.bin", tensors)


def make_adapter_blob(tensors: Sequence[tuple[str, torch.Tensor, Encoded]]) -> Blob:
    """An adapter's tensors, under the name by which `peft` and engines look for them."""
    return _safetensors_blob(ADAPTER_NAME, tensors)


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
    return _blob(name, [Piece(memoryview(head))], ordered, pads=False)


def _packed_blob(name: str, tensors: Sequence[tuple[str, torch.Tensor, Encoded]]) -> Blob:
    return _blob(name, [], tensors, pads=True)


def _blob(
    name: str,
    pieces: list[Piece],
    tensors: Sequence[tuple[str, torch.Tensor, Encoded]],
    pads: bool,
) -> Blob:
    offset = sum(piece.data.nbytes for piece in pieces)
    places = []
    for _, tensor, encoded in tensors:
        size = encoded.payload.nbytes
        padding = -size % ALIGNMENT if pads else 0
        places.append((len(pieces), offset))
        pieces.append(
            Piece.of_values(tensor) if encoded.codec == "raw" else Piece(bytes_of(encoded.payload))
        )
        if padding:
            pieces.append(Piece(memoryview(bytes(padding))))
        offset += size + padding
    return Blob(name, pieces, tensors, places)


def by_blob(manifest: Manifest) -> dict[str, list[TensorEntry]]:
    """The entries of each blob that is a safetensors file."""
    blobs: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        if entry.blob.endswith(".safetensors"):
            blobs.setdefault(entry.blob, []).append(entry)
    return blobs


def check_header(reader: BlobReader, blob: str, entries: Iterable[TensorEntry]) -> None:
    """Check that the header of a safetensors file agrees with the manifest: engines go by the file.

    Raises:
        SyncError: it does not.
    """
    size = int.from_bytes(bytes_of(reader.read(blob, 0, 8)), "little")
    if size > MAX_HEADER_BYTES:
        raise SyncError(f"the header of {blob} claims to have {size} bytes")
    try:
        header = json.loads(bytes(bytes_of(reader.read(blob, 8, size))))
        found = {
            name: (item["dtype"], item["shape"], [8 + size + at for at in item["data_offsets"]])
            for name, item in header.items()
            if name != "__metadata__"
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SyncError(f"the header of {blob} is damaged: {error}") from error
    wanted = {
        entry.name: (
            SAFETENSORS_DTYPES[entry.dtype],
            list(entry.shape),
            [entry.offset, entry.offset + entry.size],
        )
        for entry in entries
    }
    wrong = sorted(
        name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
    )
    if wrong:
        raise SyncError(f"the header and the manifest disagree about {', '.join(wrong[:3])}")
