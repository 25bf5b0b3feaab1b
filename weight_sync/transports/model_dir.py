"""Versions as plain Hugging Face directories: `*.safetensors`, with or without an index.

Nothing here was written by our publisher, so nothing vouches for a version but its own completeness:
every parameter of the model, in its shape, and no other. What is proven is what was read: tensors are
copied out of the files before they are judged, and the digest is computed from the copies. A
directory with our manifest is read by `DiskReader`, with all of its proofs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.channel import StagedWeights
from weight_sync.manifest import MANIFEST_NAME
from weight_sync.tensors import fit_tensors, weights_digest
from weight_sync.transports.disk import DiskReader, read_manifest

INDEX_NAME = "model.safetensors.index.json"


class ModelDirReader:
    """`WeightReader` of model directories below an allowed one, under the version of the caller."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()

    def stage(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> StagedWeights:
        folder = self._allowed(Path(meta.path))
        if not folder.is_dir():
            raise SyncError(f"{meta.path} is not a directory; give one with *.safetensors")
        if (folder / MANIFEST_NAME).is_file():
            return self._stage_published(meta, folder, expected)
        tensors: dict[str, torch.Tensor] = {}
        for shard in _shards(folder):
            read = _read_shard(self._allowed(shard))
            if twice := sorted(read.keys() & tensors.keys()):
                raise SyncError(f"{folder} holds {twice[0]} in two files; keep one of them")
            tensors.update(read)
        fitting = fit_tensors(tensors, expected, str(folder))
        return StagedWeights(meta.version, weights_digest(fitting), fitting)

    def _stage_published(
        self, meta: WeightUpdateMeta, folder: Path, expected: Mapping[str, torch.Size]
    ) -> StagedWeights:
        published = WeightUpdateMeta(read_manifest(folder).version, str(folder))
        staged = DiskReader(str(self._root)).stage(published, expected)
        return replace(staged, version=meta.version)

    def _allowed(self, path: Path) -> Path:
        resolved = path.resolve()
        if not resolved.is_relative_to(self._root):
            raise SyncError(f"{path} is outside of the allowed weights directory {self._root}")
        return resolved


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            return [folder / name for name in sorted(named)]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SyncError(f"{index} is not an index of shards: {error!r}") from error
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise SyncError(f"{folder} holds no *.safetensors; save the model with safetensors")
    return found


def _read_shard(path: Path) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            # Cloned: the file is mapped, and the trainer may write the next version over it.
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, KeyError) as error:
        raise SyncError(f"{path} is torn or missing: {error}") from error
