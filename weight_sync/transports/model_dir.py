"""Versions as plain Hugging Face directories: `*.safetensors`, with or without an index.

Nothing here was written by our publisher, so nothing vouches for a version but its own completeness:
every parameter of the model, in its shape, and no other. The digest is computed from what was copied
out of the files. A directory with our manifest is read by the receiver, with all of its proofs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.channel import (
    ProvenVersion,
    StagedWeights,
    WeightReader,
    WeightReceiver,
    WeightVerifier,
)
from weight_sync.manifest import MANIFEST_NAME, parse_manifest
from weight_sync.patience import Patience
from weight_sync.tensors import check_fit, weights_digest
from weight_sync.transports.base import check_allowed

INDEX_NAME = "model.safetensors.index.json"
UNREAD = ""
"""Digest of a directory of which only the headers were read."""


class ModelDirReader:
    """`WeightReader` and `WeightVerifier` of directories that are allowed.

    They take the version that the caller asks for: a plain directory has none.
    """

    def __init__(self, config: ReceiverConfig, receiver: WeightReceiver) -> None:
        self._config = config
        self._receiver = receiver

    def stage(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> StagedWeights:
        folder = self._folder(meta)
        if (folder / MANIFEST_NAME).is_file():
            staged = self._published().stage(_as_published(folder), expected)
            return replace(staged, version=meta.version)
        with self._opened(folder) as files:
            check_fit(_shapes(files), expected, lambda name: _read(files, name), str(folder))
            tensors = {name: _read(files, name) for name in expected}
        return StagedWeights(meta.version, weights_digest(tensors), tensors)

    def verify(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> ProvenVersion:
        """As `stage`, from the headers: without a manifest the bytes have nothing to be held against."""
        folder = self._folder(meta)
        reader = self._published()
        if (folder / MANIFEST_NAME).is_file() and isinstance(reader, WeightVerifier):
            proven = reader.verify(_as_published(folder), expected)
            return replace(proven, version=meta.version)
        with self._opened(folder) as files:
            check_fit(_shapes(files), expected, lambda name: _read(files, name), str(folder))
        return ProvenVersion(meta.version, UNREAD, folder)

    def _folder(self, meta: WeightUpdateMeta) -> Path:
        folder = self._allowed(Path(meta.path))
        if not folder.is_dir():
            raise SyncError(f"{meta.path} is not a directory; give one with *.safetensors")
        return folder

    def _allowed(self, path: Path) -> Path:
        check_allowed(str(path.resolve()), self._config)
        return path.resolve()

    def _published(self) -> WeightReader:
        return self._receiver.within(Patience(self._config.stage_timeout_s))

    @contextmanager
    def _opened(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Name of each tensor -> the open file that holds it."""
        files: dict[str, Any] = {}
        with ExitStack() as stack:
            try:
                for shard in _shards(folder):
                    file = stack.enter_context(safe_open(self._allowed(shard), framework="pt"))
                    for name in file.keys():  # noqa: SIM118 - a file, not a mapping
                        if name in files:
                            raise SyncError(f"{folder} holds {name} in two files; keep one of them")
                        files[name] = file
                yield files
            except (SafetensorError, OSError) as error:
                raise SyncError(f"{folder} is torn or incomplete: {error}") from error


def _as_published(folder: Path) -> WeightUpdateMeta:
    file = folder / MANIFEST_NAME
    try:
        manifest = parse_manifest(file.read_bytes(), str(file))
    except OSError as error:
        raise SyncError(f"no readable manifest at {file}: {error}") from error
    return WeightUpdateMeta(manifest.version, str(folder), manifest.digest)


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


def _shapes(files: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {name: torch.Size(file.get_slice(name).get_shape()) for name, file in files.items()}


def _read(files: Mapping[str, Any], name: str) -> torch.Tensor:
    # Cloned: the file is mapped, and the trainer may write the next version over it.
    tensor: torch.Tensor = files[name].get_tensor(name).clone()
    return tensor
