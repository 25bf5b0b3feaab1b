"""Hugging Face directories that hold only what changed, as slime, miles and SGLang exchange them.

    weight_v000000/     a whole model; if there is none, it is the one that a server started with
    weight_v000001/     what changed since its `base_version`
        model.safetensors.index.json        metadata: `version`, `base_version`, `delta_encoding`,
                                            `compression_format`, `checksum_format`
        model-00000-of-00001.safetensors    per changed tensor a zstd frame ([n] uint8);
                                            metadata: checksum of each one's new bytes

A frame is about the bytes of a tensor, row-major and little-endian:

    xor          new ^ old
    overwrite    number of changed bytes, their positions (uint32 each), their new values

Convention of THUDM/slime (pull requests 1806, 2089, 2181) and sgl-project/sglang (30366).
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xxhash
import zstandard
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open

from headway.contracts.checkpoint_store import INDEX_NAME, version_name
from headway.contracts.errors import ConfigError, SyncError
from headway.runtime.model_files import check_regular, read_object
from weight_sync.manifest import bytes_of

ANNOUNCED_NAME = ".announced"
"""In a directory of ours until it is complete."""
Bytes = NDArray[np.uint8]
Encoding = Literal["xor", "overwrite"]
ChecksumFormat = Literal["xxh3-128", "blake3", "adler32"]
POSITION_BYTES = 4
MAX_OVERWRITE_BYTES = 1 << 32
"""Positions have 32 bits."""


class _Metadata(BaseModel):
    version: int = Field(ge=0)
    base_version: int = Field(ge=0)
    delta_encoding: Encoding
    compression_format: Literal["zstd"] = "zstd"
    checksum_format: ChecksumFormat


@dataclass(frozen=True, slots=True)
class CheckpointDelta:
    """One version as the difference to another one."""

    folder: Path
    version: int
    base_version: int
    encoding: Encoding
    checksum_format: ChecksumFormat
    files: Mapping[str, Any]
    """Changed tensor -> open file with its frame."""
    checksums: Mapping[str, str]
    """Changed tensor -> checksum of its new bytes."""

    @property
    def base(self) -> Path:
        """Directory of the version that it builds on."""
        return self.folder.parent / version_name(self.base_version)

    @property
    def identity(self) -> str:
        """Tells it from what another run wrote to the same place."""
        content = repr((self.base_version, sorted(self.checksums.items())))
        return hashlib.sha256(content.encode()).hexdigest()

    def apply(self, name: str, old: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this version, given the base's; the same object if it did not change.

        Raises:
            SyncError: what is stored does not make the tensor that was published.
        """
        if name not in self.files:
            return old
        try:
            frame = bytes(self.files[name].get_tensor(name).view(np.uint8))
            changed = _DECODERS[self.encoding](frame, np.frombuffer(bytes_of(old), np.uint8))
        except (ValueError, zstandard.ZstdError, SafetensorError) as error:
            raise SyncError(f"{name} in {self.folder} is damaged: {error}") from error
        found = checksum_of(changed, self.checksum_format)
        if found != self.checksums[name]:
            raise SyncError(
                f"{name} in {self.folder} makes bytes with the {self.checksum_format} {found}, not "
                f"{self.checksums[name]}: it is damaged, or builds on other weights"
            )
        return torch.from_numpy(changed).view(old.dtype).view(old.shape)


def read_delta(folder: Path) -> CheckpointDelta | None:
    """Read what a directory says of itself; None if it is a whole model.

    Raises:
        SyncError: it says it is a difference, and cannot be read.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        return None
    try:
        content = read_object(index)
        metadata = content.get("metadata")
        if not isinstance(metadata, dict) or "delta_encoding" not in metadata:
            return None
        read = _Metadata.model_validate(metadata)
        shards = {str(name): _shard(file) for name, file in content["weight_map"].items()}
        files = {shard: _opened(folder / shard) for shard in sorted(set(shards.values()))}
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise SyncError(f"{index} describes no difference: {field}: {first['msg']}") from error
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise SyncError(f"{index} is no index of shards: {error!r}") from error
    except (SafetensorError, OSError) as error:
        raise SyncError(f"{folder} is torn or incomplete: {error}") from error
    if read.base_version >= read.version:
        raise SyncError(f"{index}: version {read.version} builds on {read.base_version}, not older")
    checksums: dict[str, str] = {}
    for file in files.values():
        checksums |= file.metadata() or {}
    unknown = sorted(shards.keys() - checksums.keys())
    if unknown:
        raise SyncError(f"{folder} has no checksum of {unknown[0]}")
    return CheckpointDelta(
        folder,
        read.version,
        read.base_version,
        read.delta_encoding,
        read.checksum_format,
        {name: files[shard] for name, shard in shards.items()},
        {name: checksums[name] for name in shards},
    )


def encode(
    new: torch.Tensor, old: torch.Tensor, encoding: Encoding, level: int = 1
) -> Bytes | None:
    """Return the frame that makes one tensor of the other; None if they are equal.

    Args:
        level: effort of zstd, 1 is fastest.
    Raises:
        SyncError: a tensor is too large for positions of 32 bits.
    """
    after, before = (np.frombuffer(bytes_of(each), np.uint8) for each in (new, old))
    if encoding == "xor":
        content = after ^ before
        is_same = not content.any()
    else:
        if after.nbytes > MAX_OVERWRITE_BYTES:
            raise SyncError(
                f"a tensor of {after.nbytes} bytes has no positions of 32 bits; set encoding: xor"
            )
        places = np.flatnonzero(after != before).astype("<u4")
        is_same = not places.size
        count = np.array([places.size], "<u4")
        content = np.concatenate([count.view(np.uint8), places.view(np.uint8), after[places]])
    if is_same:
        return None
    return np.frombuffer(zstandard.ZstdCompressor(level=level).compress(content.data), np.uint8)


def checksum_of(data: Bytes, kind: ChecksumFormat) -> str:
    """Return a checksum in hexadecimal digits.

    Raises:
        SyncError: its package is not installed.
    """
    if kind == "xxh3-128":
        return xxhash.xxh3_128_hexdigest(data.data)
    if kind == "adler32":
        return f"{zlib.adler32(data.data):08x}"
    try:
        from blake3 import blake3
    except ImportError as error:
        raise SyncError("checksums are of blake3; pip install blake3 to read them") from error
    return str(blake3(data.data).hexdigest())


def _shard(name: Any) -> str:
    if not isinstance(name, str) or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no file of this directory")
    return name


def _opened(shard: Path) -> Any:
    """A file that is closed when nobody reads it any more."""
    check_regular(shard)
    return safe_open(shard, framework="np")


def _inflate(frame: bytes, limit: int) -> Bytes:
    """The content of a frame that has no more than so many bytes."""
    size = zstandard.frame_content_size(frame)
    if size > limit:
        raise ValueError(f"it inflates to {size} bytes, of {limit} at most")
    content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=limit)
    return np.frombuffer(content, np.uint8)


def _decode_xor(frame: bytes, old: Bytes) -> Bytes:
    content = _inflate(frame, old.nbytes)
    if content.nbytes != old.nbytes:
        raise ValueError(f"it is of {content.nbytes} bytes, and the tensor of {old.nbytes}")
    return content ^ old


def _decode_overwrite(frame: bytes, old: Bytes) -> Bytes:
    content = _inflate(frame, POSITION_BYTES + (POSITION_BYTES + 1) * old.nbytes)
    count = int.from_bytes(content[:POSITION_BYTES].tobytes(), "little")
    end = POSITION_BYTES * (1 + count)
    if content.nbytes != end + count:
        raise ValueError(f"it names {count} positions, and is of {content.nbytes} bytes")
    places = content[POSITION_BYTES:end].view("<u4")
    if count and int(places.max()) >= old.nbytes:
        raise ValueError(f"position {int(places.max())} is beyond the tensor's {old.nbytes} bytes")
    new = old.copy()
    new[places] = content[end:]
    return new


_DECODERS: Mapping[Encoding, Callable[[bytes, Bytes], Bytes]] = {
    "xor": _decode_xor,
    "overwrite": _decode_overwrite,
}
