"""What a published version consists of: names, shapes, types, checksums.

`manifest.json` is written last and carries a digest of its own entries, so a version without it, or
with a manifest that was edited, is not a version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated

import torch
from pydantic import Field, StringConstraints, ValidationError

from headway.contracts.config.base import Config
from headway.contracts.errors import SyncError

FORMAT = 1
MANIFEST_NAME = "manifest.json"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
ShardName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}\.safetensors$")]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


class TensorEntry(Config):
    """One tensor of a version."""

    name: str = Field(min_length=1, max_length=512)
    shape: tuple[int, ...]
    dtype: str
    shard: ShardName
    sha256: Sha256
    """Of the tensor's bytes, row-major, little-endian."""


class Manifest(Config):
    """One version."""

    format: int = Field(FORMAT, ge=1, le=FORMAT)
    version: int = Field(ge=0)
    tensors: tuple[TensorEntry, ...] = Field(min_length=1)
    digest: Sha256
    """Of version and entries; equal digests mean equal weights."""


def make_manifest(version: int, tensors: list[TensorEntry]) -> Manifest:
    """A manifest with its digest."""
    return Manifest(version=version, tensors=tuple(tensors), digest=_digest(version, tensors))


def parse_manifest(text: str, origin: str) -> Manifest:
    """Read and prove a manifest.

    Raises:
        SyncError: not a manifest, or its digest does not match its entries.
    """
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        raise SyncError(f"{origin} is not a weight manifest: {error.errors()[0]['msg']}") from error
    if manifest.digest != _digest(manifest.version, list(manifest.tensors)):
        raise SyncError(f"{origin} was changed after it was written (digest mismatch)")
    return manifest


def tensor_sha256(tensor: torch.Tensor) -> str:
    """Checksum of a CPU tensor's bytes."""
    flat = tensor.detach().contiguous().view(-1)
    return (
        hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest() if flat.numel() else _EMPTY
    )


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a type.

    Raises:
        SyncError: a type that versions cannot hold.
    """
    for name, known in DTYPES.items():
        if known == dtype:
            return name
    raise SyncError(f"weights of type {dtype} cannot be published; known: {', '.join(DTYPES)}")


_EMPTY = hashlib.sha256(b"").hexdigest()


def _digest(version: int, tensors: list[TensorEntry]) -> str:
    rows = [[entry.name, entry.shape, entry.dtype, entry.shard, entry.sha256] for entry in tensors]
    return hashlib.sha256(json.dumps([version, rows]).encode()).hexdigest()
