"""`WeightReceiver`: what comes from any transport becomes a proven version.

A version counts when every tensor has its checksum, all of them have the digest that was announced,
and names and shapes are the model's. Reading, decoding and checking overlap, with one another and with
the publisher, who may still be writing. A tensor whose bytes are wrong is read once more, then from
the other places that hold the version, alone. A delta is applied to the version it names: the one that
serves, or one that is fetched first.
"""

from __future__ import annotations

import os
import posixpath
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from headway.contracts.config.weight_sync import ReceiverConfig
from headway.contracts.errors import Fenced, SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.adapter import merge_adapter
from weight_sync.blob import by_blob, check_header
from weight_sync.cache import FolderCache
from weight_sync.channel import ProvenVersion, Source, StagedWeights, WeightReader
from weight_sync.codecs import decode
from weight_sync.manifest import Base, Manifest, TensorEntry, content_digest, tensor_checksum
from weight_sync.patience import Patience
from weight_sync.store import StoredSource, version_name
from weight_sync.tensors import check_fit
from weight_sync.transports.base import check_allowed, local_path, open_source
from weight_sync.transports.detached import call_detached
from weight_sync.transports.disk import LocalPlace
from weight_sync.transports.meeting import Member

Shapes = Mapping[str, torch.Size]
DECODERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Threads that decode; those of a small machine have to generate."""
READ_AHEAD = 8
"""Tensors that are read and not yet decoded."""
FOLDER_TIMEOUT_S = 60.0


class Receiver:
    """The version that serves, and the means to stage the next one."""

    def __init__(self, config: ReceiverConfig) -> None:
        self._config = config
        self._held: StagedWeights | ProvenVersion | None = None
        self._cache: FolderCache | None = None

    def within(self, patience: Patience) -> WeightReader:
        return Reader(self, self._config, patience)

    def keep(self, staged: StagedWeights | ProvenVersion) -> None:
        self._held = staged
        if self._cache is not None:
            self._cache.collect(staged)

    def held(self, version: PolicyVersion) -> StagedWeights | ProvenVersion | None:
        held = self._held
        return held if held is not None and held.version == version else None

    def base(self, ref: Base) -> StagedWeights | ProvenVersion | None:
        """A version, if it is the one that serves or the one that this was merged into."""
        held = self._held
        for candidate in () if held is None else (held, held.base):
            if candidate is not None and (candidate.version, candidate.digest) == (
                ref.version,
                ref.digest,
            ):
                return candidate
        return None

    def lay_out(self, staged: StagedWeights) -> ProvenVersion:
        """A version as a folder, for an engine that reads files.

        Raises:
            SyncError: there is no room for it.
        """
        if self._cache is None:
            self._cache = FolderCache(self._config.cache_dir)
        return self._cache.lay_out(staged, self._held)

    def close(self) -> None:
        self._held = None
        if self._cache is not None:
            self._cache.close()


def make_receiver(config: ReceiverConfig) -> Receiver:
    """A server's end as configured."""
    return Receiver(config)


@dataclass(frozen=True, slots=True)
class Reader:
    """`WeightReader`, `WeightVerifier` and `WeightObserver` over every transport."""

    receiver: Receiver
    config: ReceiverConfig
    patience: Patience

    def stage(self, meta: WeightUpdateMeta, expected: Shapes) -> StagedWeights:
        failures = []
        for path in (meta.path, *meta.fallbacks):
            try:
                return self._stage(path, meta, expected)
            except Fenced:
                raise
            except SyncError as error:
                _ = self.patience.left_s
                failures.append(error.message)
        raise SyncError("; ".join(dict.fromkeys(failures)))

    def verify(self, meta: WeightUpdateMeta, expected: Shapes) -> ProvenVersion:
        proven = self._prove_in_place(meta, expected)
        if proven is not None:
            return proven
        return self.receiver.lay_out(self.stage(meta, expected))

    def follow(self, meta: WeightUpdateMeta, num_ranks: int) -> Member:
        seat = meta.seat
        if seat is None:
            raise SyncError(f"{meta.path} is a process group, and no seat was given to this server")
        check_allowed(meta.path, self.config)

        def watch() -> None:
            _ = self.patience.left_s

        return call_detached(
            lambda: Member(meta.path, meta.version, seat, self.patience, num_ranks),
            watch,
            discard=lambda late: late.leave(SyncError(f"rank {seat.rank} came too late")),
        )

    def _prove_in_place(self, meta: WeightUpdateMeta, expected: Shapes) -> ProvenVersion | None:
        """The version where it lies; None if an engine cannot read it there as it is."""
        folder = local_path(meta.path)
        if folder is None:
            return None
        try:
            with closing(self._open(meta.path, meta)) as source:
                incoming = _Incoming(source, meta, expected, self)
                if source.announcement.kind != "full" or not incoming.prove():
                    return None
                manifest = source.manifest()
            with closing(LocalPlace(folder)) as place:
                for blob, entries in by_blob(manifest).items():
                    check_header(place, blob, entries)
        except Fenced:
            raise
        except SyncError:
            _ = self.patience.left_s
            if not meta.fallbacks:
                raise
            return None
        return ProvenVersion(manifest.version, manifest.digest, folder.resolve())

    def _stage(self, path: str, meta: WeightUpdateMeta, expected: Shapes) -> StagedWeights:
        with closing(self._open(path, meta)) as source:
            incoming = _Incoming(source, replace(meta, path=path), expected, self)
            tensors = incoming.collect()
            manifest = source.manifest()
        if manifest.adapter is not None and manifest.base is not None:
            base = self.find_base(path, manifest.base, expected)
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

    def find_base(self, path: str, ref: Base, expected: Shapes) -> StagedWeights | ProvenVersion:
        """What a version builds on: one that is held, or its neighbour at the same place."""
        held = self.receiver.base(ref)
        if held is not None:
            return held
        beside = posixpath.join(posixpath.dirname(path.rstrip("/")), version_name(ref.version))
        meta = WeightUpdateMeta(ref.version, beside, ref.digest)
        return self._stage(beside, meta, expected)

    def repair(
        self, entry: TensorEntry, meta: WeightUpdateMeta
    ) -> Iterator[tuple[TensorEntry, torch.Tensor]]:
        """The stored bytes of one tensor, from each other place that holds the version."""
        for path in meta.fallbacks:
            try:
                with closing(self._open(path, meta)) as source:
                    for other in source.entries():
                        if (other.name, other.checksum) == (entry.name, entry.checksum):
                            yield other, source.read(other)
            except SyncError:
                _ = self.patience.left_s

    def _open(self, path: str, meta: WeightUpdateMeta) -> Source:
        return open_source(path, meta, self.config, self.patience)


class _Incoming:
    """One version while it comes in."""

    def __init__(
        self, source: Source, meta: WeightUpdateMeta, expected: Shapes, reader: Reader
    ) -> None:
        self._source = source
        self._meta = meta
        self._expected = expected
        self._reader = reader
        self._base: Callable[[str], torch.Tensor] | None = None
        self._is_repaired = False
        announced = source.announcement
        if announced.version != meta.version:
            raise SyncError(f"{meta.path} holds version {announced.version}, not {meta.version}")
        if announced.kind == "delta" and announced.base is not None:
            self._base = _reads(reader.find_base(meta.path, announced.base, expected))

    def collect(self) -> dict[str, torch.Tensor]:
        """All tensors, proven."""
        return dict(self._proven())

    def prove(self) -> bool:
        """Prove all tensors and keep none; false if they do not lie there as what they are."""
        shapes = {}
        for name, tensor in self._proven():
            shapes[name] = tensor.shape
        manifest = self._source.manifest()
        if manifest.kind != "full":  # it was announced before that was known
            return False
        entries = {entry.name: entry for entry in manifest.tensors}
        is_plain = all(entry.codec == "raw" for entry in entries.values())
        check_fit(
            shapes,
            self._expected,
            lambda name: self._decoded(entries[name], self._source.read(entries[name])),
            self._meta.path,
        )
        return is_plain and not self._is_repaired

    def _proven(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: list[TensorEntry] = []
        decoding: deque[tuple[TensorEntry, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(DECODERS, thread_name_prefix="weights-decode") as decoders:
            for entry in self._source.entries():
                self._check_shape(entry)
                payload = self._source.read(entry)
                seen.append(entry)
                if entry.codec == "raw":  # checked here, where it lies in the cache
                    yield entry.name, self._checked(entry, partial(self._check, entry, payload))
                else:
                    decoding.append((entry, decoders.submit(self._check, entry, payload)))
                del payload
                if len(decoding) >= READ_AHEAD:
                    oldest, check = decoding.popleft()
                    yield oldest.name, self._checked(oldest, check.result)
            for entry, check in decoding:
                yield entry.name, self._checked(entry, check.result)
        self._check_manifest(self._source.manifest(), seen)

    def _checked(self, entry: TensorEntry, check: Callable[[], torch.Tensor]) -> torch.Tensor:
        try:
            return check()
        except SyncError as error:
            return self._once_more(entry, error)

    def _once_more(self, entry: TensorEntry, failure: SyncError) -> torch.Tensor:
        try:
            return self._check(entry, self._source.read(entry))
        except SyncError:
            _ = self._reader.patience.left_s
        self._is_repaired = True
        for other, payload in self._reader.repair(entry, self._meta):
            try:
                return self._check(other, payload)
            except SyncError:
                continue
        raise failure

    def _check(self, entry: TensorEntry, payload: torch.Tensor) -> torch.Tensor:
        tensor = self._decoded(entry, payload)
        proven = payload if entry.codec == "raw" else tensor  # of raw they are the same bytes
        if tensor_checksum(proven) != entry.checksum:
            raise SyncError(f"{entry.name} in {self._meta.path}/{entry.blob} has a wrong checksum")
        return tensor

    def _decoded(self, entry: TensorEntry, payload: torch.Tensor) -> torch.Tensor:
        needs_base = entry.codec in ("same", "sparse", "dense")
        if needs_base and self._base is None:
            raise SyncError(f"{entry.name} in {self._meta.path} is a difference against nothing")
        try:
            base = self._base(entry.name) if needs_base and self._base is not None else None
        except KeyError:
            raise SyncError(f"the base of {self._meta.path} has no {entry.name}") from None
        return decode(entry, payload, base)

    def _check_shape(self, entry: TensorEntry) -> None:
        expected = self._expected.get(entry.name)
        if expected is not None and expected != entry.shape:
            raise SyncError(
                f"{self._meta.path} is of another model: {entry.name} has shape {entry.shape}, "
                f"{tuple(expected)} in the model"
            )

    def _check_manifest(self, manifest: Manifest, seen: list[TensorEntry]) -> None:
        wanted = self._meta.digest
        if wanted is not None and manifest.digest != wanted:
            raise SyncError(
                f"{self._meta.path} has the digest {manifest.digest[:12]}, announced was {wanted[:12]}"
            )
        if (
            content_digest(manifest.version, seen, manifest.adapter, manifest.base)
            != manifest.digest
        ):
            raise SyncError(f"{self._meta.path} was changed while it was read (digest mismatch)")


def _reads(version: StagedWeights | ProvenVersion) -> Callable[[str], torch.Tensor]:
    """Brings one tensor of a version at a time."""
    if isinstance(version, StagedWeights):
        return version.tensors.__getitem__
    return _folder_tensors(version.folder)


def _shapes_of(version: StagedWeights | ProvenVersion) -> dict[str, torch.Size]:
    if isinstance(version, StagedWeights):
        return {name: tensor.shape for name, tensor in version.tensors.items()}
    return {
        name: torch.Size(entry.shape) for name, entry in _folder_entries(version.folder).items()
    }


def _folder_entries(folder: Path) -> dict[str, TensorEntry]:
    with closing(LocalPlace(folder)) as place:
        source = StoredSource(place, str(folder), Patience(FOLDER_TIMEOUT_S))
        return {entry.name: entry for entry in source.entries()}


def _folder_tensors(folder: Path) -> Callable[[str], torch.Tensor]:
    """Reads the tensors of a full version on this machine, one at a time."""
    entries = _folder_entries(folder)

    def read(name: str) -> torch.Tensor:
        with closing(LocalPlace(folder)) as place:
            entry = entries[name]
            tensor = decode(entry, place.read(entry.blob, entry.offset, entry.size), None)
        if tensor_checksum(tensor) != entry.checksum:
            raise SyncError(f"{name} in {folder} was damaged after it was proven")
        return tensor

    return read
