"""Writes and reads versions as other trainers do, in words of its own."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import torch
import xxhash
import zstandard
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
SUMS = {
    "xxh3-128": lambda data: xxhash.xxh3_128(data).hexdigest(),
    "adler32": lambda data: format(zlib.adler32(data), "08x"),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def save_start(folder: Path, tensors: Tensors) -> Path:
    """A model's directory, as far as weights go."""
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


class ForeignStore:
    """A directory of versions; every n-th one is whole."""

    def __init__(
        self, root: Path, base: Tensors, encoding: str = "xor", checksum: str = "xxh3-128"
    ) -> None:
        self.root = root
        self.encoding = encoding
        self.checksum = checksum
        self.version = 0
        self._last = base
        root.mkdir(parents=True, exist_ok=True)

    def folder(self, version: int) -> Path:
        return self.root / f"weight_v{version:06d}"

    def publish(
        self,
        tensors: Tensors,
        is_whole: bool = False,
        harm: Callable[[Path], object] = lambda folder: None,
    ) -> Path:
        """Write the next version; it may come to harm before `latest` names it."""
        self.version += 1
        folder = self.folder(self.version)
        folder.mkdir()
        shard = "model-00000-of-00001.safetensors"
        metadata = {"version": f"{self.version:06d}"}
        if is_whole:
            save_file(tensors, folder / shard)
            names = list(tensors)
        else:
            frames, sums = {}, {}
            for name, tensor in tensors.items():
                new, old = raw(tensor), raw(self._last[name])
                if new != old:
                    frame = zstandard.compress(self._difference(new, old), 1)
                    frames[name] = np.frombuffer(frame, np.uint8)
                    sums[name] = SUMS[self.checksum](new)
            save_arrays(frames, folder / shard, metadata=sums)
            names = list(frames)
            metadata |= {
                "base_version": f"{self.version - 1:06d}",
                "delta_encoding": self.encoding,
                "compression_format": "zstd",
                "checksum_format": self.checksum,
            }
        index = {"metadata": metadata, "weight_map": dict.fromkeys(names, shard)}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        harm(folder)
        (self.root / "latest").write_text(folder.name)
        self._last = {name: tensor.clone() for name, tensor in tensors.items()}
        return folder

    def _difference(self, new: bytes, old: bytes) -> bytes:
        after, before = np.frombuffer(new, np.uint8), np.frombuffer(old, np.uint8)
        if self.encoding == "xor":
            return bytes(after ^ before)
        (places,) = np.nonzero(after - before)
        return struct.pack(f"<I{len(places)}I", len(places), *places) + bytes(after[places])


def upload(folder: Path, url: str) -> str:
    """Copy a version into an object store, its index and `latest` last; return where it is."""
    objects, base = fsspec.core.url_to_fs(url)
    objects.makedirs(f"{base}/{folder.name}", exist_ok=True)
    for file in sorted(folder.iterdir(), key=lambda file: file.name.endswith("index.json")):
        objects.pipe_file(f"{base}/{folder.name}/{file.name}", file.read_bytes())
    objects.pipe_file(f"{base}/latest", (folder.parent / "latest").read_bytes())
    return f"{url}/{folder.name}"


def read_store(root: Path, version: int, base: Tensors) -> Tensors:
    """The tensors of a version, by its chain."""
    folder = root / f"weight_v{version:06d}"
    if version == 0 and not folder.is_dir():
        return base
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found: Tensors = {}
    for file in sorted(set(index["weight_map"].values())):
        found |= load_file(folder / file)
    metadata = index["metadata"]
    if "delta_encoding" not in metadata:
        return found
    tensors = dict(read_store(root, int(metadata["base_version"]), base))
    for name, frame in found.items():
        content, old = zstandard.decompress(frame.numpy().tobytes()), raw(tensors[name])
        if metadata["delta_encoding"] == "xor":
            new = bytearray(np.frombuffer(content, np.uint8) ^ np.frombuffer(old, np.uint8))
        else:
            count = int.from_bytes(content[:4], "little")
            new = bytearray(old)
            for place, value in zip(
                struct.unpack_from(f"<{count}I", content, 4), content[4 + 4 * count :], strict=True
            ):
                new[place] = value
        flat = torch.frombuffer(new, dtype=torch.uint8).view(tensors[name].dtype)
        tensors[name] = flat.view(tensors[name].shape)
    return tensors
