"""Versions as plain Hugging Face directories: `*.safetensors`, with or without an index.

Nothing here was written by our publisher, so only its completeness shows that a version is right:
every parameter of the model, in its shape, and no other. The digest is computed from what was copied
out of the files, and must be the one that was published, if that is known: its writer
may have written another version over it. One with our manifest is read by the receiver, with all of
its proofs. One that holds differences (`weight_sync.checkpoint_deltas`) is made of the version that
serves, if that is its base, else of its neighbours, back to a whole one. Directories of an object store
are fetched first (`weight_sync.fetched_folders`), each when it is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from headway.contracts.checkpoint_store import INDEX_NAME
from headway.contracts.config.weight_sync import MAX_CHAIN, ReceiverConfig
from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import WeightUpdateMeta
from headway.runtime.model_files import check_regular, read_object, read_text
from headway.runtime.object_stores import is_url
from weight_sync.channel import (
    ReadTensor,
    StagedWeights,
    VerifiedVersion,
    WeightReader,
    WeightReceiver,
    WeightVerifier,
)
from weight_sync.checkpoint_deltas import ANNOUNCED_NAME, CheckpointDelta, read_delta
from weight_sync.deadline import Deadline
from weight_sync.manifest import MANIFEST_NAME, parse_manifest
from weight_sync.tensors import check_finite, check_fit, weights_digest
from weight_sync.transports.base import check_allowed

UNREAD = ""
"""Digest of a directory when only its headers were read."""


class ModelDirReader:
    """`WeightReader` and `WeightVerifier` of directories that are allowed.

    They take the version that the caller asks for: a plain directory has none.
    """

    def __init__(
        self, config: ReceiverConfig, receiver: WeightReceiver, deadline: Deadline | None = None
    ) -> None:
        self._config = config
        self._receiver = receiver
        self._deadline = deadline or Deadline(config.stage_timeout_s)
        self._fetched: Path | None = None
        """What lies below it was fetched from where the version is."""
        self._url = ""

    def stage(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> StagedWeights:
        folder = self._folder(meta)
        if (folder / MANIFEST_NAME).is_file():
            staged = self._published().stage(self._as_published(folder), expected)
            _check_digest(meta, staged.digest)
            return replace(staged, version=meta.version)
        delta, origin = read_delta(folder), None
        if delta is None:
            with self._opened(folder) as files:
                check_fit(_shapes(files), expected, lambda name: _read(files, name), str(folder))
                tensors = {name: _read(files, name) for name in expected}
        else:
            tensors, origin = self._changed(delta, expected), _origin_of(delta)
        check_finite(list(tensors.items()), str(folder))
        digest = weights_digest(tensors)
        _check_digest(meta, digest)
        return StagedWeights(meta.version, digest, tensors, origin=origin)

    def verify(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> VerifiedVersion:
        """Verify like `stage`, from the headers: without a manifest the bytes cannot be checked."""
        folder = self._folder(meta)
        reader = self._published()
        if (folder / MANIFEST_NAME).is_file() and isinstance(reader, WeightVerifier):
            verified = reader.verify(self._as_published(folder), expected)
            return replace(verified, version=meta.version)
        if read_delta(folder) is not None:
            return self._receiver.lay_out(self.stage(meta, expected))
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

    def _changed(
        self, delta: CheckpointDelta, expected: Mapping[str, torch.Size]
    ) -> dict[str, torch.Tensor]:
        """The tensors of a version that was published as a difference."""
        with ExitStack() as stack:
            deltas, read = self._chain(stack, delta)
            _check_strangers(deltas, expected)
            tensors = {}
            for name, shape in expected.items():
                tensor = read(name)
                for each in deltas:
                    tensor = each.apply(name, tensor)
                if tensor.shape != shape:
                    raise SyncError(
                        f"{delta.folder} is of another model: {name} has shape {tuple(tensor.shape)}, "
                        f"{tuple(shape)} in the model"
                    )
                tensors[name] = tensor
        return tensors

    def _chain(
        self, stack: ExitStack, last: CheckpointDelta
    ) -> tuple[list[CheckpointDelta], ReadTensor]:
        """The differences that end in this one, and the version that the first of them builds on."""
        if read := self._receiver.made_by(_origin_of(last)):
            return [], read
        deltas = [last]
        while len(deltas) <= MAX_CHAIN:
            first = deltas[0]
            base = self._base(first)
            if base is None:
                kept = self._receiver.made_by(f"{first.base}#")
                start = self._receiver.start if first.base_version == 0 else None
                return deltas, kept or self._whole(stack, first, start)
            earlier = read_delta(self._allowed(base))
            if earlier is None:
                return deltas, self._whole(stack, first, base)
            if read := self._receiver.made_by(_origin_of(earlier)):
                return deltas, read
            deltas.insert(0, earlier)
        raise SyncError(
            f"{last.folder} builds on more than {MAX_CHAIN} differences; publish a whole version more "
            "often"
        )

    def _whole(self, stack: ExitStack, delta: CheckpointDelta, folder: Path | None) -> ReadTensor:
        """Reads the whole model that a difference builds on."""
        if folder is None or not folder.is_dir():
            raise SyncError(
                f"{delta.folder} builds on version {delta.base_version}, which neither serves here nor "
                f"stands beside it; publish a whole version"
            )
        files = stack.enter_context(self._opened(folder, folder == self._receiver.start))

        def read(name: str) -> torch.Tensor:
            if name not in files:
                raise SyncError(f"{folder}, on which {delta.folder} builds, has no {name}")
            return _read(files, name)

        return read

    def _base(self, delta: CheckpointDelta) -> Path | None:
        """Directory of the version that a difference builds on, if there is one."""
        if self._fetched is None:
            return delta.base if delta.base.is_dir() else None
        url = f"{self._url.rpartition('/')[0]}/{delta.base.name}"
        return self._receiver.fetch(url, self._deadline, is_base=True)

    def _folder(self, meta: WeightUpdateMeta) -> Path:
        if is_url(meta.path):
            return self._fetched_folder(meta.path.rstrip("/"))
        folder = self._allowed(Path(meta.path))
        while (folder / ANNOUNCED_NAME).exists():  # it is being written
            self._deadline.pause()
        if not folder.is_dir():
            raise SyncError(f"{meta.path} is not a directory; give one with *.safetensors")
        return folder

    def _fetched_folder(self, url: str) -> Path:
        check_allowed(url, self._config)
        folder = self._receiver.fetch(url, self._deadline)
        if folder is None:
            raise SyncError(f"{url} is not a directory; give one with *.safetensors")
        self._fetched, self._url = folder.parent, url
        return folder

    def _allowed(self, path: Path) -> Path:
        path = path.resolve()
        if self._fetched is None or not path.is_relative_to(self._fetched):
            check_allowed(str(path), self._config)
        return path

    def _as_published(self, folder: Path) -> WeightUpdateMeta:
        return replace(_as_published(folder), path=self._url or str(folder))

    def _published(self) -> WeightReader:
        return self._receiver.within(Deadline(self._config.stage_timeout_s))

    @contextmanager
    def _opened(self, folder: Path, is_ours: bool = False) -> Iterator[dict[str, Any]]:
        """Name of each tensor -> the open file that holds it.

        Args:
            is_ours: it need not be allowed.
        """
        files: dict[str, Any] = {}
        with ExitStack() as stack:
            try:
                for shard in _shards(folder):
                    path = shard.resolve() if is_ours else self._allowed(shard)
                    check_regular(path)
                    file = stack.enter_context(safe_open(path, framework="pt"))
                    for name in file.keys():  # noqa: SIM118 - a file, not a mapping
                        if name in files:
                            raise SyncError(f"{folder} holds {name} in two files; keep one of them")
                        files[name] = file
                yield files
            except (SafetensorError, OSError, ConfigError, OverflowError) as error:
                raise SyncError(f"{folder} is torn or incomplete: {error}") from error


def _origin_of(delta: CheckpointDelta) -> str:
    return f"{delta.folder}#{delta.identity}"


def _check_strangers(deltas: Sequence[CheckpointDelta], expected: Mapping[str, torch.Size]) -> None:
    """A tied weight may come under both of its names; nothing else may come that the model has not."""
    for delta in deltas:
        known = {delta.checksums[name] for name in delta.files if name in expected}
        for name in sorted(delta.files.keys() - expected.keys()):
            if delta.checksums[name] not in known:
                raise SyncError(f"{delta.folder} is of another model: it changes {name}")


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
