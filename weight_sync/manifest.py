"""Manifest of a published version: names, shapes, types, checksums, and the position of the bytes.

    v00000007/manifest.json            the whole version; written last: without it there is no version
    v00000007/part-00000.json          the entries of one blob; written when the blob is complete
    v00000007/shard-00000.safetensors  a blob

Parts let a receiver read behind a publisher that is still writing. The digest covers what the weights
*are* (version, names, shapes, types, checksums of the values), not how they travel: a full version, a
delta against another one and a peer's copy of the same weights have the same digest.

Checksums are xxh3 (128 bits): they find damage of any kind at the speed of memory. Weights published
from a GPU without passing the host have those of `gpu_checksum`, which a GPU can compute; a tensor is
verified with the one that its entry names. Neither is a proof against an attacker who can write to the
medium, who could write a manifest as well.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
import xxhash
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from headway.contracts.config.base import Config
from headway.contracts.errors import SyncError
from weight_sync.gpu_checksum import PREFIX, multilinear_checksums

FORMAT = 2
MANIFEST_NAME = "manifest.json"
MAX_DIMS = 64
MAX_SIZE = 1 << 63

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Checksum = Annotated[str, StringConstraints(pattern=rf"^({PREFIX})?[0-9a-f]{{32}}$")]
BlobName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$")]
Codec = Literal["raw", "same", "sparse", "dense", "int8", "float8_e4m3fn"]
"""Encoding of a tensor's bytes (`weight_sync.codecs`)."""
Kind = Literal["full", "delta", "adapter"]

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorEntry(Config):
    """One tensor of a version."""

    name: str = Field(min_length=1, max_length=512)
    shape: tuple[Annotated[int, Field(ge=0, lt=MAX_SIZE)], ...] = Field(max_length=MAX_DIMS)
    dtype: str
    """Type of the decoded values."""
    checksum: Checksum
    """Checksum of the bytes of the decoded values, row-major, little-endian."""
    blob: BlobName
    offset: int = Field(0, ge=0, lt=MAX_SIZE)
    """Offset of the stored bytes in the blob."""
    size: int = Field(ge=0, lt=MAX_SIZE)
    """Stored bytes."""
    codec: Codec = "raw"
    is_finite: bool = False
    """True if the publisher saw that no value is NaN or infinite; else receivers look for themselves."""


class Base(Config):
    """The version that a delta or an adapter builds on."""

    version: int = Field(ge=0)
    digest: Digest


class Adapter(Config):
    """A low-rank adapter, as `peft` describes one."""

    rank: int = Field(ge=1)
    alpha: float = Field(gt=0.0)
    config: dict[str, object] = {}
    """`adapter_config.json`, for engines that load adapters by themselves."""


class Manifest(Config):
    """One version."""

    format: int = Field(FORMAT, ge=FORMAT, le=FORMAT)
    version: int = Field(ge=0)
    kind: Kind = "full"
    base: Base | None = None
    """None for a full version."""
    adapter: Adapter | None = None
    tensors: tuple[TensorEntry, ...] = Field(min_length=1)
    digest: Digest
    """Digest of version and content; equal digests mean equal weights."""


def make_manifest(
    version: int,
    tensors: Sequence[TensorEntry],
    kind: Kind = "full",
    base: Base | None = None,
    adapter: Adapter | None = None,
) -> Manifest:
    """A manifest with its digest."""
    return Manifest(
        version=version,
        kind=kind,
        base=base,
        adapter=adapter,
        tensors=tuple(tensors),
        digest=content_digest(version, tensors, adapter, base),
    )


def parse_manifest(text: str | bytes, origin: str) -> Manifest:
    """Read and verify a manifest.

    Raises:
        SyncError: not a manifest, or its digest does not match its entries.
    """
    try:
        manifest = Manifest.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise SyncError(f"{origin} is not a weight manifest: {field}: {first['msg']}") from error
    names = Counter(entry.name for entry in manifest.tensors)
    if len(names) < len(manifest.tensors):
        raise SyncError(f"{origin} names {names.most_common(1)[0][0]!r} more than once")
    digest = content_digest(manifest.version, manifest.tensors, manifest.adapter, manifest.base)
    if manifest.digest != digest:
        raise SyncError(f"{origin} was changed after it was written (digest mismatch)")
    if (manifest.kind == "full") != (manifest.base is None) or (manifest.kind == "adapter") != (
        manifest.adapter is not None
    ):
        raise SyncError(
            f"{origin} is of kind {manifest.kind} with base {manifest.base} and "
            f"adapter {manifest.adapter}"
        )
    if manifest.base is not None and manifest.base.version >= manifest.version:
        raise SyncError(f"{origin} builds on version {manifest.base.version}, which is not older")
    return manifest


_ENTRIES = TypeAdapter(tuple[TensorEntry, ...])


def write_part(entries: Sequence[TensorEntry]) -> str:
    """The text of one part."""
    return _ENTRIES.dump_json(tuple(entries)).decode()


def parse_part(text: str | bytes, origin: str) -> tuple[TensorEntry, ...]:
    """Read the entries of one part.

    Raises:
        SyncError: not a part.
    """
    try:
        return _ENTRIES.validate_json(text)
    except ValidationError as error:
        raise SyncError(
            f"{origin} is not a part of a version: {error.errors()[0]['msg']}"
        ) from error


def part_name(number: int) -> str:
    """File of the n-th part."""
    return f"part-{number:05d}.json"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; valid as long as the tensor is."""
    flat = tensor.detach().contiguous()
    if flat.ndim != 1:
        flat = flat.view(-1)
    if flat.dtype != torch.uint8 and flat.numel():
        flat = flat.view(torch.uint8)
    return flat.numpy().data if flat.numel() else memoryview(b"")


def tensor_checksum(tensor: torch.Tensor) -> str:
    """Checksum of a CPU tensor's values."""
    return xxhash.xxh3_128_hexdigest(bytes_of(tensor))


def has_checksum(tensor: torch.Tensor, checksum: str) -> bool:
    """True if the tensor's values have this checksum, of either kind; on any device."""
    if checksum.startswith(PREFIX):
        return multilinear_checksums([tensor.contiguous()]) == [checksum]
    return tensor_checksum(tensor.cpu()) == checksum


def dtype_name(dtype: torch.dtype) -> str:
    """The manifest's name of a type.

    Raises:
        SyncError: a type that versions cannot hold.
    """
    if dtype not in _NAMES:
        raise SyncError(f"weights of type {dtype} cannot be published; known: {', '.join(DTYPES)}")
    return _NAMES[dtype]


def torch_dtype(name: str) -> torch.dtype:
    """The type of a manifest's name.

    Raises:
        SyncError: a type that versions cannot hold.
    """
    if name not in DTYPES:
        raise SyncError(f"type {name!r} is unknown; known: {', '.join(DTYPES)}")
    return DTYPES[name]


def content_digest(
    version: int,
    tensors: Sequence[TensorEntry],
    adapter: Adapter | None = None,
    base: Base | None = None,
) -> str:
    """Return the digest of the weights, independent of the order and the form in which they travel.

    The base counts for an adapter only: the tensors of a delta are what they are on any base.
    """
    rows = sorted([entry.name, entry.shape, entry.dtype, entry.checksum] for entry in tensors)
    merge = None
    if adapter is not None and base is not None:
        merge = [adapter.rank, adapter.alpha, adapter.config, base.version, base.digest]
    content = json.dumps([version, rows, merge], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
