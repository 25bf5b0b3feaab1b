"""The tensors of a version as a server gets them: one at a time, through deltas and adapters."""

from __future__ import annotations

import math
from contextlib import closing

import torch

from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.adapter import adapter_pairs, merge_weight, scale_of
from weight_sync.codecs import decode
from weight_sync.commands.catalog import Catalog
from weight_sync.manifest import Manifest, TensorEntry, has_checksum, torch_dtype

DIFFERENCES = ("same", "sparse", "dense")
"""Codecs that need the base."""


class VersionTensors:
    """One version and its bases.

    Raises:
        SyncError: the version is not complete, or a base is gone or another one.
    """

    def __init__(self, catalog: Catalog, version: PolicyVersion) -> None:
        self._catalog = catalog
        self._version = version
        manifest = catalog.manifest(version)
        if manifest is None:
            raise SyncError(f"there is no complete version at {catalog.path_of(version)}")
        self.manifest = manifest
        self._entries = {entry.name: entry for entry in manifest.tensors}
        self._base = self._find_base()
        self._pairs = {}
        if manifest.adapter is not None:
            stored = {name: self._stored(entry) for name, entry in self._entries.items()}
            pairs = adapter_pairs(stored, manifest.adapter)
            self._pairs = {f"{module}.weight": pair for module, pair in pairs.items()}
            unknown = sorted(self._pairs.keys() - self.kinds().keys())
            if unknown:
                raise SyncError(
                    f"version {version} adapts {unknown[0]}, which its base does not have"
                )

    def kinds(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape and type."""
        if self._base is not None and self.manifest.adapter is not None:
            return self._base.kinds()
        return {entry.name: (entry.shape, entry.dtype) for entry in self.manifest.tensors}

    def read(self, name: str) -> torch.Tensor:
        """Return a verified tensor.

        Raises:
            SyncError: it or one of its bases is damaged.
        """
        adapter = self.manifest.adapter
        if adapter is None or self._base is None:
            return self._stored(self._entries[name])
        weight = self._base.read(name)
        if name not in self._pairs:
            return weight
        a, b = self._pairs[name]
        if tuple(weight.shape) != (b.shape[0], a.shape[1]):
            raise SyncError(
                f"version {self._version} adapts {name} of {tuple(weight.shape)} with "
                f"{tuple(a.shape)} and {tuple(b.shape)}"
            )
        return merge_weight(weight, a, b, scale_of(adapter))

    def _stored(self, entry: TensorEntry) -> torch.Tensor:
        base = None
        if entry.codec in DIFFERENCES and self._base is not None:
            if entry.name not in self._base.kinds():
                raise SyncError(f"the base of version {self._version} has no {entry.name}")
            base = self._base.read(entry.name)
        with closing(self._catalog.open(self._version)) as blobs:
            tensor = decode(entry, blobs.read(entry.blob, entry.offset, entry.size), base)
        if not has_checksum(tensor, entry.checksum):
            raise SyncError(
                f"{entry.name} in {self._catalog.path_of(self._version)}/{entry.blob} has a wrong "
                "checksum"
            )
        return tensor

    def _find_base(self) -> VersionTensors | None:
        ref = self.manifest.base
        if ref is None:
            return None
        base = VersionTensors(self._catalog, ref.version)
        if base.manifest.digest != ref.digest:
            raise SyncError(
                f"version {self._version} builds on version {ref.version} with the digest "
                f"{ref.digest[:12]}; the one there has {base.manifest.digest[:12]}"
            )
        return base


def plain_bytes(manifest: Manifest) -> int:
    """Bytes of the values, whatever form they are stored in."""
    return sum(
        math.prod(entry.shape) * torch_dtype(entry.dtype).itemsize for entry in manifest.tensors
    )
