"""Versions as Hugging Face directories, for engines that are not ours, and for servers that are.

See `weight_sync.checkpoint_deltas` for the layout. A version counts once its index is there, and `latest`
names it then. Our servers wait for that while the directory says that it was announced. The versions lie
in a directory or an object store.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save as save_arrays
from safetensors.torch import save as save_tensors

from headway.contracts.checkpoint_store import (
    INDEX_NAME,
    POINTER_NAME,
    number_of,
    version_name,
)
from headway.contracts.config.weight_sync import CheckpointSync, Dtype, ReceiverConfig
from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.channel import NamedTensors, Source
from weight_sync.checkpoint_deltas import (
    ANNOUNCED_NAME,
    checksum_of,
    encode,
)
from weight_sync.deadline import Deadline
from weight_sync.device_copy import buckets_on_host
from weight_sync.manifest import bytes_of
from weight_sync.published_tensors import Bucket, buckets, outgoing
from weight_sync.store import surplus_of
from weight_sync.tensors import check_finite, digest_of, digest_row
from weight_sync.transports.checkpoint_files import open_files

COPIED = ("*.json", "*.jinja", "*.model", "*.txt")
"""Files of a model that are no weights."""


class CheckpointPublisher:
    """`WeightPublisher` into a directory or an object store."""

    sends_from_device = False

    def __init__(self, config: CheckpointSync) -> None:
        self._config = config
        self._files = open_files(config.root)
        self._held: dict[str, torch.Tensor] = {}
        """The last version as it was published: the base of the next difference."""
        self._held_version: PolicyVersion | None = None
        self._chain = 0
        """Differences since the last whole version."""
        self._announced: PolicyVersion | None = None
        self._deadline = Deadline(math.inf)
        for name in self._names():
            if number_of(name) is not None and not self._is_complete(name):
                self._files.delete(name)

    @property
    def dtype(self) -> Dtype | None:
        return self._config.dtype

    def announce(self, version: PolicyVersion) -> WeightUpdateMeta:
        name, path = version_name(version), self._path(version)
        try:
            if self._is_complete(name):
                raise SyncError(f"{path} exists; a version is published once, take a newer number")
            self._files.write(f"{name}/{ANNOUNCED_NAME}", b"")
        except OSError as error:
            raise self._failure(version, error) from error
        self._announced = version
        self._deadline = Deadline(math.inf)
        return WeightUpdateMeta(version, f"model://{path}")

    def publish(self, version: PolicyVersion, tensors: NamedTensors) -> WeightUpdateMeta:
        if self._announced != version or not self._names(version_name(version)):
            self.announce(version)
        with self._whole_or_nothing(version):
            base = self._base_of(version)
            files: dict[str, str] = {}
            rows: list[list[Any]] = []
            ready = buckets(outgoing(tensors, self._config), self._config.shard_bytes)
            for number, bucket in enumerate(buckets_on_host(ready)):
                self._deadline.check()
                check_finite(bucket, f"version {version}")
                shard = f"model-{number:05d}.safetensors"
                names = self._write_shard(f"{version_name(version)}/{shard}", bucket, base)
                files |= dict.fromkeys(names, shard)
                rows += [digest_row(name, tensor) for name, tensor in bucket]
            self._deadline.check()
            self._complete(version, base, files)
        self._held_version = version
        self._chain = 0 if base is None else self._chain + 1
        return WeightUpdateMeta(version, f"model://{self._path(version)}", digest_of(rows))

    def follow(self, version: PolicyVersion, decision: Future[PolicyVersion]) -> None:
        if version == self._announced:
            self._deadline.end_if_refused(version, decision)

    def latest(self) -> PolicyVersion | None:
        return max(self._versions(), default=None)

    def collect(
        self, committed: PolicyVersion, pinned: Collection[PolicyVersion] = ()
    ) -> list[PolicyVersion]:
        versions = self._versions()
        surplus = surplus_of(versions, committed, self._config.keep, pinned, self._base_version)
        for version in surplus:
            self._files.delete(version_name(version))
        return surplus

    def close(self) -> None:
        self._files.close()

    def _path(self, version: PolicyVersion) -> str:
        return f"{self._files.root}/{version_name(version)}"

    def _names(self, folder: str = "") -> list[str]:
        try:
            return self._files.names(folder)
        except OSError as error:
            raise SyncError(f"cannot read {self._files.root}: {error}") from error

    def _is_complete(self, name: str) -> bool:
        return INDEX_NAME in self._names(name)

    def _versions(self) -> list[PolicyVersion]:
        numbers = {name: number_of(name) for name in self._names()}
        return sorted(
            number
            for name, number in numbers.items()
            if number is not None and self._is_complete(name)
        )

    def _base_version(self, version: PolicyVersion) -> PolicyVersion | None:
        file = f"{version_name(version)}/{INDEX_NAME}"
        try:
            base = json.loads(self._files.read(file))["metadata"].get("base_version")
            return None if base is None else int(base)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SyncError(
                f"{self._files.root}/{file} is no index of a version: {error!r}"
            ) from error

    def _base_of(self, version: PolicyVersion) -> PolicyVersion | None:
        delta, held = self._config.delta, self._held_version
        if delta is None or held is None or held >= version:
            return None
        if not self._names(version_name(held)):
            return None
        return held if self._chain + 1 < delta.full_every else None

    def _write_shard(self, file: str, bucket: Bucket, base: PolicyVersion | None) -> list[str]:
        """Write what changed of a bucket, or all of it; return the names that it holds."""
        copies = {name: tensor.clone() for name, tensor in bucket}  # some may share memory
        if base is None:
            self._files.write(file, save_tensors(copies, metadata={"format": "pt"}))
            self._held |= copies if self._config.delta is not None else {}
            return list(copies)
        delta = self._config.delta
        assert delta is not None
        frames: dict[str, Any] = {}
        checksums: dict[str, str] = {}
        for name, tensor in copies.items():
            frame = encode(tensor, self._old(name, tensor), self._config.encoding, delta.level)
            if frame is not None:
                frames[name] = frame
                data = np.frombuffer(bytes_of(tensor), np.uint8)
                checksums[name] = checksum_of(data, self._config.checksum)
        if frames:
            self._files.write(file, save_arrays(frames, metadata=checksums))
        self._held |= copies
        return list(frames)

    def _old(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        old = self._held.get(name)
        if old is None or (old.shape, old.dtype) != (tensor.shape, tensor.dtype):
            raise SyncError(
                f"{name} is not what it was in version {self._held_version}, by name, shape or type; set "
                "weight_sync.delta: null for models that change so"
            )
        return old

    def _complete(
        self, version: PolicyVersion, base: PolicyVersion | None, files: dict[str, str]
    ) -> None:
        """Write the index, and let `latest` name the version."""
        folder = version_name(version)
        metadata = {"version": f"{version:06d}"}
        if base is not None:
            metadata |= {
                "base_version": f"{base:06d}",
                "delta_encoding": self._config.encoding,
                "compression_format": "zstd",
                "checksum_format": self._config.checksum,
            }
        elif self._config.files_from is not None:
            for pattern in COPIED:
                for file in Path(self._config.files_from).glob(pattern):
                    if file.name != INDEX_NAME:
                        self._files.write(f"{folder}/{file.name}", file.read_bytes())
        index = json.dumps({"metadata": metadata, "weight_map": files})
        self._files.write(f"{folder}/{INDEX_NAME}", index.encode())
        self._files.remove(f"{folder}/{ANNOUNCED_NAME}")
        self._files.write(POINTER_NAME, folder.encode())

    @contextmanager
    def _whole_or_nothing(self, version: PolicyVersion) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._held.clear()  # some of it is of this version
            self._held_version = None
            self._files.delete(version_name(version))
            if isinstance(error, OSError):
                raise self._failure(version, error) from error
            raise
        finally:
            self._announced = None
            self._deadline = Deadline(math.inf)

    def _failure(self, version: PolicyVersion, error: OSError) -> SyncError:
        return SyncError(f"cannot write version {version} to {self._files.root}: {error}")


class CheckpointChannel:
    """`WeightChannel` of such directories."""

    schemes = ("model",)

    def make_publisher(self, config: CheckpointSync) -> CheckpointPublisher:
        return CheckpointPublisher(config)

    def open_source(
        self, path: str, meta: WeightUpdateMeta, config: ReceiverConfig, deadline: Deadline
    ) -> Source:
        raise SyncError(f"{path} has no manifest of ours; it is read whole, as a directory")


CHANNEL = CheckpointChannel()
