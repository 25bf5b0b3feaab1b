"""The two ends of a weight channel. A version is seen whole or not at all.

The trainer's end publishes a version and returns where it lies; a server's end stages it (reads and
proves it, while generation goes on) so that the commit is a copy between two decode steps. Who tells
whom is not this room's business: the gateway coordinates over HTTP.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch

from headway.contracts.types import PolicyVersion, WeightUpdateMeta


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A proven version in memory, ready to be swapped in."""

    version: PolicyVersion
    digest: str
    tensors: Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProvenVersion:
    """A proven version where it lies, for an engine that reads it by itself."""

    version: PolicyVersion
    digest: str
    folder: Path


class WeightPublisher(Protocol):
    """The trainer's end."""

    def locate(self, version: PolicyVersion) -> WeightUpdateMeta:
        """Where a version lies or will lie."""

    def publish(
        self, version: PolicyVersion, tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> WeightUpdateMeta:
        """Write a version; it becomes visible at once and whole.

        Raises:
            SyncError: the version exists, or the medium is full or gone.
        """

    def latest(self) -> PolicyVersion | None:
        """The newest published version."""

    def collect(self, committed: PolicyVersion) -> list[PolicyVersion]:
        """Delete old versions, never `committed` or newer; returns what was deleted."""


class WeightReader(Protocol):
    """A server's end."""

    def stage(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> StagedWeights:
        """Read a version and prove it against its manifest and the model's parameters.

        Raises:
            SyncError: torn, tampered, of another model, or outside the allowed directory.
        """


@runtime_checkable
class WeightVerifier(Protocol):
    """A reader that can prove a version without keeping it in memory."""

    def verify(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> ProvenVersion:
        """As `WeightReader.stage`, one tensor at a time.

        Raises:
            SyncError: torn, tampered, of another model, or outside the allowed directory.
        """
