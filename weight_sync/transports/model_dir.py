"""Versions as plain Hugging Face directories: `*.safetensors`, with or without an index.

Nothing here was written by our publisher, so only its completeness shows that a version is right:
every parameter of the model, in its shape, and no other. The digest is computed from what was copied
out of the files, and must be the one that was published, if that is known: whoever wrote the directory
may have written another version over it. One with our manifest is read by the receiver, with all of
its proofs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import WeightUpdateMeta
from headway.runtime.model_files import check_regular, read_object, read_text
from weight_sync.channel import (
    StagedWeights,
    VerifiedVersion,
    WeightReader,
    WeightReceiver,
    WeightVerifier,
)
from weight_sync.deadline import Deadline
from weight_sync.manifest import MANIFEST_NAME, parse_manifest
from weight_sync.tensors import check_fit, weights_digest
from weight_sync.transports.base import check_allowed

INDEX_NAME = "model.safetensors.index.json"
UNREAD = ""
"""Digest of a directory when only its headers were read."""


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
            _check_digest(meta, staged.digest)
            return replace(staged, version=meta.version)
        with self._opened(folder) as files:
            check_fit(_shapes(files), expected, lambda name: _read(files, name), str(folder))
            tensors = {name: _read(files, name) for name in expected}
        digest = weights_digest(tensors)
        _check_digest(meta, digest)
        return StagedWeights(meta.version, digest, tensors)

    def verify(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> VerifiedVersion:
        """Verify like `stage`, from the headers: without a manifest the bytes cannot be checked."""
        folder = self._folder(meta)
        reader = self._published()
        if (folder / MANIFEST_NAME).is_file() and isinstance(reader, WeightVerifier):
            verified = reader.verify(_as_published(folder), expected)
            return replace(verified, version=meta.version)
        with self._opened(folder) as files:
            check_fit(_shapes(files), expected, lambda name: _read(files, name), str(folder))
        return VerifiedVersion(meta.version, UNREAD, folder)

    def verify_whole(
        self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]
    ) -> VerifiedVersion:
        """Verify every byte, as `stage` does: what an engine is to read must be what others have."""
        verified = self.verify(meta, expected)
        if verified.digest == UNREAD:
            with self._opened(verified.folder) as files:
                verified = replace(verified, digest=weights_digest(_Tensors(files)))
        _check_digest(meta, verified.digest)
        return verified

    def _folder(self, meta: WeightUpdateMeta) -> Path:
        folder = self._allowed(Path(meta.path))
        if not folder.is_dir():
            raise SyncError(f"{meta.path} is not a directory; give one with *.safetensors")
        return folder

    def _allowed(self, path: Path) -> Path:
        check_allowed(str(path.resolve()), self._config)
        return path.resolve()

    def _published(self) -> WeightReader:
        return self._receiver.within(Deadline(self._config.stage_timeout_s))

    @contextmanager
    def _opened(self, folder: Path) -> Iterator[dict[str, Any]]:
        """Name of each tensor -> the open file that holds it."""
        files: dict[str, Any] = {}
        with ExitStack() as stack:
            try:
                for shard in _shards(folder):
                    check_regular(self._allowed(shard))
                    file = stack.enter_context(safe_open(self._allowed(shard), framework="pt"))
                    for name in file.keys():  # noqa: SIM118 - a file, not a mapping
                        if name in files:
                            raise SyncError(f"{folder} holds {name} in two files; keep one of them")
                        files[name] = file
                yield files
            except (SafetensorError, OSError, ConfigError, OverflowError) as error:
                raise SyncError(f"{folder} is torn or incomplete: {error}") from error


class _Tensors(Mapping[str, torch.Tensor]):
    """Tensors of open files, read one at a time."""

    def __init__(self, files: Mapping[str, Any]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        return _read(self._files, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _check_digest(meta: WeightUpdateMeta, digest: str) -> None:
    if meta.digest and meta.digest != digest:
        raise SyncError(
            f"{meta.path} holds other weights than version {meta.version} was published with; publish "
            "them as a version of their own"
        )


def _as_published(folder: Path) -> WeightUpdateMeta:
    file = folder / MANIFEST_NAME
    try:
        manifest = parse_manifest(read_text(file), str(file))
    except ConfigError as error:
        raise SyncError(f"no readable manifest at {file}: {error}") from error
    return WeightUpdateMeta(manifest.version, str(folder), manifest.digest)


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.exists():
        try:
            named = set(read_object(index)["weight_map"].values())
            return [folder / name for name in sorted(named)]
        except (ConfigError, KeyError, TypeError, AttributeError) as error:
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
