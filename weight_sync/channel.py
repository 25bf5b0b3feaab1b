"""The two ends of a weight channel. A version is seen whole or not at all.

The trainer's end (`WeightPublisher`) publishes a version; a server's end (`WeightReceiver`) stages it,
that is, reads and verifies it while generation goes on, so that the commit is an exchange between two
decode steps. Coordination is not part of this package: the gateway does that over HTTP.

A `WeightChannel` is one transport with both ends. The scheme of a version's path names it:

    /runs/weights/v00000007            disk; also fsspec's schemes, s3://bucket/run/v00000007
    shm:///dev/shm/run/v00000007       shared memory of one host
    http://trainer:8100/v00000007      HTTP
    gloo://trainer:29500/v00000007     a process group (nccl:// on GPUs, ipc:// on one host)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from headway.contracts.config.weight_sync import Dtype, ReceiverConfig
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.deadline import Deadline
from weight_sync.manifest import Manifest, TensorEntry
from weight_sync.store import Announcement

if TYPE_CHECKING:
    from weight_sync.transports.nccl import Build
    from weight_sync.transports.participant import Participant

NamedTensors = Iterable[tuple[str, torch.Tensor]]
ReadTensor = Callable[[str], torch.Tensor]
"""Returns one tensor of a version, on the CPU."""


@dataclass(frozen=True, slots=True)
class StagedWeights:
    """A verified version in memory, ready to be swapped in. Its tensors are never written to."""

    version: PolicyVersion
    digest: str
    tensors: Mapping[str, torch.Tensor]
    entries: tuple[TensorEntry, ...] = ()
    """Entries of the tensors in the version's manifest; empty if they are not all of it."""
    base: StagedWeights | VerifiedVersion | None = None
    """Version that an adapter was merged into; the next adapter will be merged into it, too."""
    origin: str | None = None
    """Place and identity of a difference between Hugging Face directories that it was made by."""


@dataclass(frozen=True, slots=True)
class VerifiedVersion:
    """A verified version in a folder, for an engine that reads it by itself."""

    version: PolicyVersion
    digest: str
    folder: Path
    base: VerifiedVersion | None = None
    """See `StagedWeights`."""
    origin: str | None = None
    """See `StagedWeights`."""


class WeightPublisher(Protocol):
    """The trainer's end; used by one thread."""

    @property
    def dtype(self) -> Dtype | None:
        """Type that `publish` casts to; None keeps the type. Ranks cast their shards before they
        gather.
        """

    @property
    def sends_from_device(self) -> bool:
        """True if a GPU's tensors are sent from the GPU, without a copy on the host."""

    def announce(self, version: PolicyVersion) -> WeightUpdateMeta:
        """Return the path or channel of a version; from now on receivers may wait there for it.

        Raises:
            SyncError: the version exists, or the medium is full or gone.
        """

    def publish(self, version: PolicyVersion, tensors: NamedTensors) -> WeightUpdateMeta:
        """Publish a version that was announced; it counts once its manifest is there.

        Args:
            version: newer than every published one.
            tensors: one after the other; only a few shards of them are held at a time.
        Raises:
            SyncError: the version exists or was refused, the medium is full or gone, or the
                receivers are.
        """

    def follow(self, version: PolicyVersion, decision: Future[PolicyVersion]) -> None:
        """Follow the service's decision about an announced version.

        A refusal ends its `publish`, now or when it begins, and no later one, even of the same number.
        A broadcast returns only once the decision is there: until then servers may ask for it once
        more, if one of them died after it had received it.
        """

    def latest(self) -> PolicyVersion | None:
        """The newest published version."""

    def collect(
        self, committed: PolicyVersion, pinned: Collection[PolicyVersion] = ()
    ) -> list[PolicyVersion]:
        """Delete old versions, never `committed`, newer or pinned ones; returns what was deleted."""

    def close(self) -> None:
        """End what runs in the background."""


class WeightReader(Protocol):
    """Reads one version."""

    def stage(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> StagedWeights:
        """Read a version and verify it against its manifest and the model's parameters.

        Args:
            expected: names and shapes of the model; empty if there is no model to compare it with.
        Raises:
            SyncError: torn, tampered, of another model, or outside what is allowed.
        """


@runtime_checkable
class WeightVerifier(Protocol):
    """A reader that can verify a version without keeping it in memory."""

    def verify(self, meta: WeightUpdateMeta, expected: Mapping[str, torch.Size]) -> VerifiedVersion:
        """Like `WeightReader.stage`, but the version ends up whole in a local directory.

        Raises:
            SyncError: as `stage`.
        """


@runtime_checkable
class WeightObserver(Protocol):
    """A reader that takes part in a process group for the processes of an engine."""

    @property
    def deadline(self) -> Deadline:
        """Deadline of the wait for the version."""

    def follow(
        self, meta: WeightUpdateMeta, num_ranks: int, build: Build | None = None
    ) -> Participant:
        """Join the rendezvous with the ranks from `meta.group_rank` on; others receive the bytes.

        Args:
            build: of those others; None if it is not known.
        Raises:
            SyncError: it is not allowed, or its trainer is gone.
        """


class WeightReceiver(Protocol):
    """A server's end; one update at a time."""

    def within(self, deadline: Deadline) -> WeightReader:
        """A reader that gives up when this deadline passes."""

    def keep(self, staged: StagedWeights | VerifiedVersion) -> None:
        """This version serves now: the base of deltas, and what peers may fetch."""

    def offer(self, staged: StagedWeights) -> None:
        """Hold a version that no publisher has stored, for peers and this server itself to fetch.

        Only the last one is held, until any version serves.
        """

    def held(self, version: PolicyVersion) -> StagedWeights | VerifiedVersion | None:
        """Return the version if this process holds it, for peers to fetch."""

    def made_by(self, origin: str) -> ReadTensor | None:
        """Return a reader of the version that serves, if its origin is this one, or begins so."""

    def lay_out(self, staged: StagedWeights) -> VerifiedVersion:
        """A version as a folder, for an engine that reads files.

        Raises:
            SyncError: it does not fit.
        """

    def fetch(self, url: str, deadline: Deadline, is_base: bool = False) -> Path | None:
        """Bring a directory of an object store to this machine; None if there is none.

        Args:
            is_base: the version that was fetched before builds on it.
        Raises:
            SyncError: it cannot be read, or does not fit on the disk.
        """

    @property
    def start(self) -> Path | None:
        """Directory of the weights that served before any version, if they came from one."""

    def close(self) -> None:
        """Let go of files and connections."""


class Source(Protocol):
    """One version at one place, as its bytes come in."""

    @property
    def announcement(self) -> Announcement:
        """Announcement: all that is known before the first tensor."""

    def entries(self) -> Iterator[TensorEntry]:
        """Every tensor, as soon as its bytes can be read; ends when the version is complete.

        Raises:
            SyncError: the publisher stopped, or the directory is gone.
        """

    def read(self, entry: TensorEntry) -> torch.Tensor:
        """The stored bytes of a tensor that came: [size] uint8, owned by the caller.

        May be called again for bytes that turned out wrong: a source fetches them again if it can.
        """

    def manifest(self) -> Manifest:
        """Return the manifest, once all entries have come."""

    def close(self) -> None:
        """Let go of files and connections; tensors that were read stay valid."""


class WeightChannel(Protocol):
    """One transport, both ends; a module of `weight_sync.transports` provides it."""

    schemes: tuple[str, ...]
    """Schemes of the paths that it handles; an empty one stands for plain directories."""

    def make_publisher(self, config: Any) -> WeightPublisher:
        """The trainer's end, from this transport's section of the configuration."""

    def open_source(
        self, path: str, meta: WeightUpdateMeta, config: ReceiverConfig, deadline: Deadline
    ) -> Source:
        """A version at `path`, which `ReceiverConfig.allow` permits.

        Raises:
            SyncError: there is none.
        """
