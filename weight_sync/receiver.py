"""`WeightReceiver`: what comes from any transport becomes a verified version.

A version counts when every tensor has its checksum, all of them have the digest that was announced,
and names and shapes are the model's. Reading, decoding and checking overlap, with one another and with
the publisher, which may still be writing (`IncomingVersion`). A delta is applied to the version it
names: the one that serves, or one that is fetched first.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.contracts.config.weight_sync import MAX_CHAIN, ReceiverConfig
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.adapter import merge_adapter
from weight_sync.blob import by_blob, check_header
from weight_sync.channel import (
    ReadTensor,
    Source,
    StagedWeights,
    VerifiedVersion,
    WeightReader,
)
from weight_sync.codecs import check_stored_size, decode
from weight_sync.deadline import Deadline
from weight_sync.fetched_folders import FetchedFolders
from weight_sync.folder_cache import FolderCache
from weight_sync.incoming import IncomingVersion, Shapes
from weight_sync.manifest import Base, TensorEntry, has_checksum
from weight_sync.store import StoredSource, version_name
from weight_sync.tensors import check_fit
from weight_sync.transports.base import (
    MODEL_SCHEME,
    check_allowed,
    local_path,
    open_source,
    place_of,
    scheme_of,
)
from weight_sync.transports.daemon_calls import call_detached
from weight_sync.transports.disk import LocalReader
from weight_sync.transports.model_dir import ModelDirReader
from weight_sync.transports.nccl import Build
from weight_sync.transports.participant import Participant

FOLDER_TIMEOUT_S = 60.0


class Receiver:
    """The version that serves, and the means to stage the next one."""

    def __init__(self, config: ReceiverConfig, start: Path | None = None) -> None:
        self.start = start
        self._config = config
        self._held: StagedWeights | VerifiedVersion | None = None
        self._offered: StagedWeights | None = None
        self._cache: FolderCache | None = None
        self._fetched: FetchedFolders | None = None

    def within(self, deadline: Deadline) -> WeightReader:
        return Reader(self, self._config, deadline)

    def keep(self, staged: StagedWeights | VerifiedVersion) -> None:
        self._held, self._offered = staged, None
        if self._cache is not None:
            self._cache.collect(staged)
        if self._fetched is not None:
            self._fetched.keep()

    def offer(self, staged: StagedWeights) -> None:
        self._offered = staged

    def offered(self, meta: WeightUpdateMeta) -> StagedWeights | None:
        """Return the version that was offered here, if it is this one."""
        offered = self._offered
        is_it = offered is not None and (offered.version, offered.digest) == (
            meta.version,
            meta.digest,
        )
        return offered if is_it else None

    def held(self, version: PolicyVersion) -> StagedWeights | VerifiedVersion | None:
        candidates = (self._offered, self._held)
        return next((one for one in candidates if one and one.version == version), None)

    def made_by(self, origin: str) -> ReadTensor | None:
        held = self._held
        return _reads(held) if held is not None and (held.origin or "").startswith(origin) else None

    def base(self, ref: Base) -> StagedWeights | VerifiedVersion | None:
        """A version, if it is the one that serves or the one that this was merged into."""
        held = self._held
        for candidate in () if held is None else (held, held.base):
            if candidate is not None and (candidate.version, candidate.digest) == (
                ref.version,
                ref.digest,
            ):
                return candidate
        return None

    def lay_out(self, staged: StagedWeights) -> VerifiedVersion:
        if self._cache is None:
            self._cache = FolderCache(self._config.cache_dir)
        return self._cache.lay_out(staged, self._held)

    def fetch(self, url: str, deadline: Deadline, is_base: bool = False) -> Path | None:
        if self._fetched is None:
            self._fetched = FetchedFolders(self._config.cache_dir)
        return self._fetched.fetch(url, deadline, is_base)

    def close(self) -> None:
        self._held = self._offered = None
        for cache in (self._cache, self._fetched):
            if cache is not None:
                cache.close()


def make_receiver(config: ReceiverConfig, start: str | None = None) -> Receiver:
    """A server's end as configured.

    Args:
        start: directory of the weights that serve before any version; None if they are random.
    """
    return Receiver(config, None if start is None else Path(start))


@dataclass(frozen=True, slots=True)
class Reader:
    """`WeightReader`, `WeightVerifier` and `WeightObserver` over every transport."""

    receiver: Receiver
    config: ReceiverConfig
    deadline: Deadline
    num_built: int = 0
    """Number of versions that build on the one being read."""

    def stage(self, meta: WeightUpdateMeta, expected: Shapes) -> StagedWeights:
        offered = self.receiver.offered(meta)
        if offered is not None:
            return offered
        failures = []
        for path in (meta.path, *meta.fallbacks):
            try:
                if scheme_of(path) == MODEL_SCHEME:
                    return self._model_dir.stage(_in_folder(meta, path), expected)
                return self._stage(path, meta, expected)
            except Fenced:
                raise
            except SyncError as error:
                self.deadline.check()
                failures.append(error.message)
        raise SyncError("; ".join(dict.fromkeys(failures)))

    def verify(self, meta: WeightUpdateMeta, expected: Shapes) -> VerifiedVersion:
        if scheme_of(meta.path) == MODEL_SCHEME and not meta.fallbacks:
            return self._model_dir.verify_whole(_in_folder(meta, meta.path), expected)
        verified = self._verify_in_place(meta, expected)
        if verified is not None:
            return verified
        # The engine's processes need the GPU's memory; what passes here leaves by files.
        config = self.config.model_copy(update={"on_device": False})
        return self.receiver.lay_out(replace(self, config=config).stage(meta, expected))

    def follow(
        self, meta: WeightUpdateMeta, num_ranks: int, build: Build | None = None
    ) -> Participant:
        group_rank = meta.group_rank
        if group_rank is None:
            raise SyncError(f"{meta.path} is a process group, and no rank was given to this server")
        check_allowed(meta.path, self.config)

        def watch() -> None:
            self.deadline.check()

        return call_detached(
            lambda: Participant(
                meta.path, meta.version, group_rank, self.deadline, num_ranks, build
            ),
            watch,
            discard=lambda late: late.leave(SyncError(f"rank {group_rank.rank} came too late")),
        )

    @property
    def _model_dir(self) -> ModelDirReader:
        return ModelDirReader(self.config, self.receiver, self.deadline)

    def _verify_in_place(self, meta: WeightUpdateMeta, expected: Shapes) -> VerifiedVersion | None:
        """Verify the version in place; None if an engine cannot read it there as it is."""
        folder = local_path(meta.path)
        if folder is None or scheme_of(meta.path) == MODEL_SCHEME:
            return None
        try:
            with closing(self._open(meta.path, meta)) as source:
                incoming = self._incoming(source, meta, expected)
                if source.announcement.kind != "full" or not incoming.verify_in_place():
                    return None
                manifest = source.manifest()
            with closing(LocalReader(folder)) as blobs:
                for blob, entries in by_blob(manifest).items():
                    check_header(blobs, blob, entries)
        except Fenced:
            raise
        except SyncError:
            self.deadline.check()
            if not meta.fallbacks:
                raise
            return None
        return VerifiedVersion(manifest.version, manifest.digest, folder.resolve())

    def _stage(self, path: str, meta: WeightUpdateMeta, expected: Shapes) -> StagedWeights:
        with closing(self._open(path, meta)) as source:
            incoming = self._incoming(source, replace(meta, path=path), expected)
            tensors = incoming.collect()
            manifest = source.manifest()
        if manifest.adapter is not None and manifest.base is not None:
            base = self._find_base(path, manifest.base, expected)
            shapes = dict(expected) or _shapes_of(base)
            tensors = merge_adapter(tensors, manifest.adapter, _reads(base), shapes)
            return StagedWeights(manifest.version, manifest.digest, tensors, base=base)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        expected = expected or shapes
        check_fit(shapes, expected, tensors.__getitem__, path)
        return StagedWeights(
            manifest.version,
            manifest.digest,
            {name: tensors[name] for name in expected},
            manifest.tensors,
        )

    def _find_base(self, path: str, ref: Base, expected: Shapes) -> StagedWeights | VerifiedVersion:
        """Return the version that another one builds on: one that is held, or its neighbour at the
        same location.
        """
        held = self.receiver.base(ref)
        if held is not None:
            return held
        if self.num_built == MAX_CHAIN:
            raise SyncError(
                f"{path} builds on version {ref.version} and more than {MAX_CHAIN} builds on it; publish "
                "a whole version more often (full_every)"
            )
        beside = posixpath.join(posixpath.dirname(path.rstrip("/")), version_name(ref.version))
        meta = WeightUpdateMeta(ref.version, beside, ref.digest)
        return replace(self, num_built=self.num_built + 1)._stage(beside, meta, expected)

    def _copies(
        self, entry: TensorEntry, meta: WeightUpdateMeta
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """The stored bytes of one tensor, from each other place that holds the version."""
        for path in meta.fallbacks:
            try:
                with closing(self._open(path, meta)) as source:
                    for other in source.entries():
                        if (other.name, other.shape, other.checksum) == (
                            entry.name,
                            entry.shape,
                            entry.checksum,
                        ):
                            check_stored_size(other)
                            yield other, source.read(other)
            except SyncError:
                self.deadline.check()

    def _incoming(
        self, source: Source, meta: WeightUpdateMeta, expected: Shapes
    ) -> IncomingVersion:
        return IncomingVersion(
            source,
            meta,
            expected,
            self.deadline,
            lambda base: _reads(self._find_base(meta.path, base, expected)),
            lambda entry: self._copies(entry, meta),
        )

    def _open(self, path: str, meta: WeightUpdateMeta) -> Source:
        return open_source(path, meta, self.config, self.deadline)


def _in_folder(meta: WeightUpdateMeta, path: str) -> WeightUpdateMeta:
    """The version at a path that names a directory, of this machine or in an object store."""
    return replace(meta, path=str(local_path(path) or place_of(path)))


def _reads(version: StagedWeights | VerifiedVersion) -> ReadTensor:
    """Brings one tensor of a version at a time, on the CPU."""
    if isinstance(version, StagedWeights):
        tensors = version.tensors
        return lambda name: tensors[name].cpu()
    return _folder_tensors(version.folder)


def _shapes_of(version: StagedWeights | VerifiedVersion) -> dict[str, torch.Size]:
    if isinstance(version, StagedWeights):
        return {name: tensor.shape for name, tensor in version.tensors.items()}
    return {
        name: torch.Size(entry.shape) for name, entry in _folder_entries(version.folder).items()
    }


def _folder_entries(folder: Path) -> dict[str, TensorEntry]:
    with closing(LocalReader(folder)) as blobs:
        source = StoredSource(blobs, str(folder), Deadline(FOLDER_TIMEOUT_S))
        return {entry.name: entry for entry in source.entries()}


def _folder_tensors(folder: Path) -> ReadTensor:
    """Reads the tensors of a full version on this machine, one at a time."""
    entries = _folder_entries(folder)

    def read(name: str) -> torch.Tensor:
        with closing(LocalReader(folder)) as blobs:
            entry = entries[name]
            tensor = decode(entry, blobs.read(entry.blob, entry.offset, entry.size), None)
        if not has_checksum(tensor, entry.checksum):
            raise SyncError(f"{name} in {folder} was damaged after it was verified")
        return tensor

    return read
