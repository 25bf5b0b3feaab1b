"""Updates of weights in SGLang's order of things, each through the version gate and as a whole.

Weights come from a directory, or in buckets over a process group (`GroupUpdates`). `_lock` covers a
publication from the choice of its version to its flush, so two never interleave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.contracts.config.server import UpdatePolicy
from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.types import WeightUpdateMeta
from headway.dialects.sglang.version_labels import VersionLabels, next_version
from inference_server.backends.base import GenerationBackend, StagedVersion
from inference_server.dialects.sglang.group_updates import (
    GroupUpdates,
    UpdateOptions,
    weights_source,
)
from inference_server.version_gate import VersionGate
from weight_sync.channel import WeightReader
from weight_sync.manifest import tensor_checksum
from weight_sync.tensors import weights_digest
from weight_sync.transports.model_dir import ModelDirReader
from weight_sync.transports.process_group import CollectiveReader


@dataclass(frozen=True, slots=True)
class Published:
    """Result of an update."""

    label: str
    running: int
    """Sequences that were running at the swap."""
    was_flushed: bool
    """False: shared prefixes were asked to go, and could not, since sequences were running."""


class SGLangWeightUpdates:
    """All updates of one server that do not come through our own publication."""

    def __init__(
        self,
        backend: GenerationBackend,
        gate: VersionGate,
        weights: ReceiverConfig,
        timeout_s: float,
    ) -> None:
        self._backend = backend
        self._gate = gate
        self._reader = ModelDirReader(weights, gate.receiver)
        self._lock = asyncio.Lock()
        self.groups = GroupUpdates(backend, timeout_s, self._publish_received, self._rename)
        """What trainers broadcast to this server."""
        self.labels = VersionLabels(gate.version)

    @property
    def label(self) -> str:
        """Label of the served weights."""
        return self.labels.label(self._gate.version)

    async def from_disk(self, path: str, options: UpdateOptions) -> Published:
        """Publish a directory.

        Raises:
            ServiceError: it is missing, torn, of another model or not allowed.
        """
        return await self._publish(path, self._reader, options)

    async def read(self, name: str) -> torch.Tensor:
        """A parameter that serves.

        Raises:
            DataError: there is none of this name.
        """
        source = weights_source(self._backend)
        async with self._lock:
            return await asyncio.to_thread(source.read_parameter, name)

    async def checksums(self) -> tuple[dict[str, str], str]:
        """Return the checksum of every served parameter, and the digest of all of them."""
        source = weights_source(self._backend)

        def compute() -> tuple[dict[str, str], str]:
            tensors = {name: source.read_parameter(name) for name in source.parameters}
            return {n: tensor_checksum(t) for n, t in tensors.items()}, weights_digest(tensors)

        async with self._lock:
            return await asyncio.to_thread(compute)

    async def _publish_received(
        self, tensors: Mapping[str, torch.Tensor], options: UpdateOptions
    ) -> Published:
        reader = CollectiveReader(tensors, weights_source(self._backend))
        return await self._publish("what was received", reader, options)

    async def _rename(self, label: str) -> None:
        async with self._lock:
            self.labels.name(self._gate.version, label)

    async def _publish(self, path: str, reader: WeightReader, options: UpdateOptions) -> Published:
        def number(current: int) -> int:
            version = next_version(options.label, current)
            self.labels.name(version, options.label)  # before it samples the first token
            named.append(version)
            return version

        def load(version: int) -> StagedVersion:
            return self._backend.stage(WeightUpdateMeta(version, path), reader)

        named: list[int] = []
        async with self._lock:
            try:
                policy: UpdatePolicy | None = "abort" if options.aborts else None
                running = await self._gate.update(number, load, policy)
            except BaseException:
                for version in named:
                    self.labels.name(version, None)
                raise
            was_flushed = not options.flushes or await self._backend.flush()
            return Published(self.labels.label(named[0]), running, was_flushed)
