"""Versions as directories on a local or shared filesystem.

    root/v00000007/manifest.json  shard-00000.safetensors ...     visible, proven by checksums
    root/.staging-v00000008-4242/                                 being written, never read

Shards and manifest are written and fsynced in the staging directory; one rename makes the version
visible, and the parent directory is fsynced after it. A crash leaves at most a staging directory,
which the next publisher removes.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from headway.contracts.config.weight_sync import DiskSync
from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.channel import ProvenVersion, StagedWeights
from weight_sync.manifest import (
    DTYPES,
    MANIFEST_NAME,
    Manifest,
    TensorEntry,
    dtype_name,
    make_manifest,
    parse_manifest,
    tensor_sha256,
)

_VERSION_NAME = re.compile(r"v(\d{8,})")
STAGING_PREFIX = ".staging-"


def version_name(version: PolicyVersion) -> str:
    """Directory name of a version."""
    return f"v{version:08d}"


def list_versions(root: Path) -> list[PolicyVersion]:
    """Visible versions, oldest first."""
    if not root.is_dir():
        return []
    matches = (_VERSION_NAME.fullmatch(entry.name) for entry in root.iterdir())
    return sorted(int(match.group(1)) for match in matches if match)


class DiskPublisher:
    """`WeightPublisher` into a directory; one publisher per directory."""

    def __init__(self, root: str, keep: int, shard_bytes: int, dtype: str | None = None) -> None:
        self._root = Path(root).resolve()
        self._keep = keep
        self._shard_bytes = shard_bytes
        self._dtype = None if dtype is None else DTYPES[dtype]
        self._root.mkdir(parents=True, exist_ok=True)
        for leftover in self._root.glob(f"{STAGING_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def locate(self, version: PolicyVersion) -> WeightUpdateMeta:
        return WeightUpdateMeta(version=version, path=str(self._root / version_name(version)))

    def publish(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightUpdateMeta:
        final = self._root / version_name(version)
        if final.exists():
            raise SyncError(f"{final} exists; a version is published once, take a newer number")
        staging = self._root / f"{STAGING_PREFIX}{version_name(version)}-{os.getpid()}"
        try:
            staging.mkdir()
            entries = [
                entry
                for index, shard in enumerate(self._shards(tensors))
                for entry in self._write_shard(staging, f"shard-{index:05d}.safetensors", shard)
            ]
            if not entries:
                raise SyncError(f"version {version} has no tensors; publish the model's parameters")
            manifest = make_manifest(version, entries)
            _write_durably(staging / MANIFEST_NAME, manifest.model_dump_json().encode())
            _fsync(staging)
            staging.rename(final)
            _fsync(self._root)
        except (OSError, SafetensorError) as error:
            raise SyncError(
                f"cannot publish version {version} below {self._root}: {error}"
            ) from error
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return self.locate(version)

    def latest(self) -> PolicyVersion | None:
        versions = list_versions(self._root)
        return versions[-1] if versions else None

    def collect(self, committed: PolicyVersion) -> list[PolicyVersion]:
        older = [version for version in list_versions(self._root) if version < committed]
        surplus = older[: max(0, len(older) - (self._keep - 1))]
        for version in surplus:
            doomed = self._root / f"{STAGING_PREFIX}deleted-{version_name(version)}"
            (self._root / version_name(version)).rename(
                doomed
            )  # a reader sees it whole or not at all
            shutil.rmtree(doomed, ignore_errors=True)
        return surplus

    def _shards(
        self, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[dict[str, torch.Tensor]]:
        shard: dict[str, torch.Tensor] = {}
        size, storages = 0, set[int]()
        for name, tensor in tensors:
            held = tensor.detach().to(device="cpu", dtype=self._dtype).contiguous()
            if shard and size + held.nbytes > self._shard_bytes:
                yield shard
                shard, size, storages = {}, 0, set()
            if held.untyped_storage().data_ptr() in storages:
                held = held.clone()  # tied or sliced: the format wants memory of its own for each
            storages.add(held.untyped_storage().data_ptr())
            shard[name] = held
            size += held.nbytes
        if shard:
            yield shard

    def _write_shard(
        self, staging: Path, shard_name: str, shard: Mapping[str, torch.Tensor]
    ) -> list[TensorEntry]:
        path = staging / shard_name
        save_file(dict(shard), path)
        path.chmod(0o644)  # safetensors writes 0600; servers may run as another user
        _fsync(path)
        return [
            TensorEntry(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                shard=shard_name,
                sha256=tensor_sha256(tensor),
            )
            for name, tensor in shard.items()
        ]


def make_publisher(config: DiskSync) -> DiskPublisher:
    """The trainer's end as configured."""
    return DiskPublisher(config.root, config.keep, config.shard_bytes, config.dtype)


class DiskReader:
    """`WeightReader` of versions below an allowed directory."""

    def __init__(self, root: str) -> None:
        self._root = Path(root).resolve()

    def stage(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> StagedWeights:
        folder, manifest = self._manifest_of(meta, expected)
        tensors = dict(_read_tensors(folder, manifest))
        return StagedWeights(manifest.version, manifest.digest, tensors)

    def verify(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> ProvenVersion:
        folder, manifest = self._manifest_of(meta, expected)
        for _ in _read_tensors(folder, manifest):
            pass
        return ProvenVersion(manifest.version, manifest.digest, folder)

    def _manifest_of(
        self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]
    ) -> tuple[Path, Manifest]:
        folder = self._allowed(meta.path)
        manifest = read_manifest(folder)
        if manifest.version != meta.version:
            raise SyncError(f"{folder} holds version {manifest.version}, not {meta.version}")
        _check_against(manifest, expected, folder)
        for shard in {entry.shard for entry in manifest.tensors}:
            self._allowed(str(folder / shard))
        return folder, manifest

    def _allowed(self, path: str) -> Path:
        folder = Path(path).resolve()
        if not folder.is_relative_to(self._root):
            raise SyncError(f"{path} is outside of the allowed weights directory {self._root}")
        return folder


def read_manifest(folder: Path) -> Manifest:
    """The proven manifest of a version directory.

    Raises:
        SyncError: there is none, or it does not hold.
    """
    file = folder / MANIFEST_NAME
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SyncError(f"no readable manifest at {file}: {error}") from error
    return parse_manifest(text, str(file))


def _check_against(manifest: Manifest, expected: Mapping[str, torch.Size], folder: Path) -> None:
    published = {entry.name: tuple(entry.shape) for entry in manifest.tensors}
    missing = sorted(expected.keys() - published.keys())
    extra = sorted(published.keys() - expected.keys())
    shapes = [
        f"{name}: {published[name]} published, {tuple(shape)} in the model"
        for name, shape in expected.items()
        if name in published and published[name] != tuple(shape)
    ]
    if missing or extra or shapes:
        raise SyncError(
            f"{folder} is of another model: missing {missing[:3]}, extra {extra[:3]}, shapes {shapes[:3]}"
        )


def _read_tensors(folder: Path, manifest: Manifest) -> Iterator[tuple[str, torch.Tensor]]:
    """The proven tensors of a version, one shard after the other."""
    by_shard: dict[str, list[TensorEntry]] = {}
    for entry in manifest.tensors:
        by_shard.setdefault(entry.shard, []).append(entry)
    for shard, entries in by_shard.items():
        try:
            with safe_open(folder / shard, framework="pt", device="cpu") as file:
                for entry in entries:
                    # Cloned: the file is mapped, and may be deleted once this version is old.
                    tensor = file.get_tensor(entry.name).clone()
                    _prove(entry, tensor, folder)
                    yield entry.name, tensor
        except (SafetensorError, OSError, KeyError) as error:
            raise SyncError(f"{folder / shard} is torn: {error}") from error


def _prove(entry: TensorEntry, tensor: torch.Tensor, folder: Path) -> None:
    if (tuple(tensor.shape), dtype_name(tensor.dtype)) != (tuple(entry.shape), entry.dtype):
        raise SyncError(f"{entry.name} in {folder / entry.shard} is not what the manifest says")
    if tensor_sha256(tensor) != entry.sha256:
        raise SyncError(f"{entry.name} in {folder / entry.shard} has a wrong checksum")


def _write_durably(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    _fsync(path)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
