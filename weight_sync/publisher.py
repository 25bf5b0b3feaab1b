"""`WeightPublisher` into a store of versions: gathers, encodes and writes concurrently.

The caller's thread gathers the next bucket while others encode, write and checksum those before it;
receivers read what is written already.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from threading import Semaphore

import torch

from headway.contracts.config.weight_sync import Dtype, StoredSync
from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion, WeightUpdateMeta
from weight_sync.adapter import (
    CONFIG_NAME,
    PREFIX,
    adapter_config,
    adapter_pairs,
    check_adapter,
    model_names,
)
from weight_sync.blob import make_adapter_blob, make_blob, plain
from weight_sync.channel import NamedTensors
from weight_sync.codecs import Encoded, encode_delta, encode_quantized
from weight_sync.deadline import Deadline
from weight_sync.device_copy import buckets_on_host, on_host
from weight_sync.manifest import (
    MANIFEST_NAME,
    Adapter,
    Base,
    Kind,
    Manifest,
    TensorEntry,
    make_manifest,
    parse_manifest,
    part_name,
    write_part,
)
from weight_sync.published_tensors import Bucket, buckets, outgoing
from weight_sync.store import ANNOUNCEMENT_NAME, Announcement, Store, surplus_of, versions_in
from weight_sync.tensors import check_finite

WRITERS = 2
"""Buckets that are encoded and written at a time, while the next one is gathered."""


@dataclass(frozen=True, slots=True)
class _Held:
    """The last version as it was published: the base of the next delta."""

    ref: Base
    tensors: Mapping[str, torch.Tensor]
    chain: int
    """Deltas since the last full version."""


class StoredPublisher:
    """Versions in a store; one publisher per store."""

    def __init__(self, store: Store, config: StoredSync) -> None:
        self._store = store
        self._config = config
        self._held: _Held | None = None
        self._announced: PolicyVersion | None = None
        self._deadline = Deadline(math.inf)
        for version in versions_in(store.names()):
            if store.text(version, MANIFEST_NAME) is None:
                store.delete(version)

    @property
    def dtype(self) -> Dtype | None:
        return self._config.dtype

    @property
    def sends_from_device(self) -> bool:
        return False

    def announce(self, version: PolicyVersion, adapted: Base | None = None) -> WeightUpdateMeta:
        """See `WeightPublisher`; `adapted` is the base if the version will be an adapter."""
        if self._store.text(version, MANIFEST_NAME) is not None:
            raise SyncError(
                f"{self._store.path_of(version)} exists; a version is published once, take a newer number"
            )
        try:
            self._store.delete(version)  # what an attempt before this one left
            self._write_announcement(version, adapted)
        except OSError as error:
            raise self._failure(version, error) from error
        self._announced = version
        self._deadline = Deadline(math.inf)
        return WeightUpdateMeta(version, self._store.path_of(version))

    def publish(self, version: PolicyVersion, tensors: NamedTensors) -> WeightUpdateMeta:
        if self._store.text(version, ANNOUNCEMENT_NAME) is None or self._is_complete(version):
            self.announce(version)  # raises if it is complete
        base, self._held = self._base_of(version), None  # a publication that fails leaves no base
        writing = _Writing(self._store, version, self._config, base)
        with self._whole_or_nothing(version):
            ready = buckets(outgoing(tensors, self._config), self._config.shard_bytes)
            manifest = writing.run(buckets_on_host(ready), self._deadline)
        if self._config.delta is not None:
            ref = Base(version=version, digest=manifest.digest)
            self._held = _Held(ref, writing.kept, 0 if base is None else base.chain + 1)
        return WeightUpdateMeta(version, self._store.path_of(version), manifest.digest)

    def publish_adapter(
        self, version: PolicyVersion, tensors: NamedTensors, adapter: Adapter, base: Base
    ) -> WeightUpdateMeta:
        """Publish a low-rank adapter; servers merge it into its base (`weight_sync.adapter`).

        Args:
            version: newer than every published one; announce it with its base, so that receivers
                know from the start what comes.
            tensors: what `peft.get_peft_model_state_dict` returns.
            adapter: from `make_adapter`.
            base: a stored version, full or a delta; many adapters may build on one.
        Raises:
            SyncError: as `publish`; a base that is not here, or no adapter that can be merged.
        """
        if not self.takes_adapters:
            raise SyncError(
                "an adapter is published as it is; unset weight_sync.quantization, or publish the "
                "model whole"
            )
        check_adapter(adapter)
        self._check_base(version, base)
        named = dict(outgoing(model_names(tensors), self._config))
        modules = adapter_pairs(named, adapter)
        check_finite(list(named.items()), f"version {version}")
        if self._store.text(version, ANNOUNCEMENT_NAME) is None or self._is_complete(version):
            self.announce(version, base)
        with self._whole_or_nothing(version):
            self._write_announcement(version, base)  # it may have been announced as a full version
            blob = make_adapter_blob(
                [(PREFIX + name, t, plain(t)) for name, t in on_host(list(named.items()))]
            )
            entries = blob.entries(self._store.write_blob(version, blob.name, blob.pieces))
            self._store.write_text(version, CONFIG_NAME, adapter_config(adapter, modules))
            self._store.sync()
            self._deadline.check()
            manifest = make_manifest(version, entries, "adapter", base, adapter)
            self._store.write_text(version, MANIFEST_NAME, manifest.model_dump_json())
        return WeightUpdateMeta(version, self._store.path_of(version), manifest.digest)

    @property
    def takes_adapters(self) -> bool:
        """True if `publish_adapter` is possible: 8 bits would round the adapter."""
        return self._config.quantization is None

    def base(self, version: PolicyVersion) -> Base | None:
        """Return a stored version for adapters to build on."""
        found = self._manifest(version)
        return None if found is None else Base(version=version, digest=found.digest)

    def follow(self, version: PolicyVersion, decision: Future[PolicyVersion]) -> None:
        if version == self._announced:
            self._deadline.end_if_refused(version, decision)

    def latest(self) -> PolicyVersion | None:
        versions = self._complete()
        return versions[-1] if versions else None

    def collect(
        self, committed: PolicyVersion, pinned: Collection[PolicyVersion] = ()
    ) -> list[PolicyVersion]:
        """See `WeightPublisher`; never deletes pinned versions, or the base of the next delta."""
        versions = self._complete()
        needed = set(pinned) if self._held is None else {*pinned, self._held.ref.version}
        surplus = surplus_of(versions, committed, self._config.keep, needed, self._base_version)
        for version in surplus:
            self._store.delete(version)
        return surplus

    def close(self) -> None:
        self._store.close()

    def _base_of(self, version: PolicyVersion) -> _Held | None:
        delta, held = self._config.delta, self._held
        if delta is None or held is None or held.ref.version >= version:
            return None
        return held if held.chain + 1 < delta.full_every else None

    def _base_version(self, version: PolicyVersion) -> PolicyVersion | None:
        manifest = self._manifest(version)
        return None if manifest is None or manifest.base is None else manifest.base.version

    def _manifest(self, version: PolicyVersion) -> Manifest | None:
        text = self._store.text(version, MANIFEST_NAME)
        return None if text is None else parse_manifest(text, self._store.path_of(version))

    def _check_base(self, version: PolicyVersion, base: Base) -> None:
        found = self._manifest(base.version)
        if found is None or found.digest != base.digest:
            there = "is not there" if found is None else f"has the digest {found.digest[:12]}"
            raise SyncError(
                f"adapter version {version} builds on version {base.version} with the digest "
                f"{base.digest[:12]}, but {self._store.path_of(base.version)} {there}; publish that "
                "version whole first, also the model that the run starts from"
            )
        if found.kind == "adapter":
            raise SyncError(
                f"adapter version {version} builds on version {base.version}, which is an adapter; "
                f"name its base, version {found.base.version if found.base else None}"
            )

    def _write_announcement(self, version: PolicyVersion, adapted: Base | None) -> None:
        held = self._base_of(version)
        announcement = Announcement(version=version)
        if adapted is not None:
            announcement = Announcement(version=version, kind="adapter", base=adapted)
        elif held is not None:
            announcement = Announcement(version=version, kind="delta", base=held.ref)
        self._store.write_text(version, ANNOUNCEMENT_NAME, announcement.model_dump_json())

    def _complete(self) -> list[PolicyVersion]:
        return [v for v in versions_in(self._store.names()) if self._is_complete(v)]

    def _is_complete(self, version: PolicyVersion) -> bool:
        return self._store.text(version, MANIFEST_NAME) is not None

    @contextmanager
    def _whole_or_nothing(self, version: PolicyVersion) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._discard(version)
            raise self._failure(version, error) from error
        except BaseException:
            self._discard(version)
            raise
        finally:
            self._deadline = Deadline(math.inf)

    def _discard(self, version: PolicyVersion) -> None:
        with suppress(OSError):  # the next publisher removes what this one cannot
            self._store.sync()
        with suppress(OSError):
            self._store.delete(version)

    def _failure(self, version: PolicyVersion, error: OSError) -> SyncError:
        return SyncError(
            f"cannot publish version {version} at {self._store.path_of(version)}: {error}"
        )


class _Writing:
    """One version on its way into the store."""

    def __init__(
        self, store: Store, version: PolicyVersion, config: StoredSync, base: _Held | None
    ) -> None:
        self._store = store
        self._version = version
        self._config = config
        self._base = base
        self._entries: list[TensorEntry] = []
        self.kept: dict[str, torch.Tensor] = {}
        """The values as published, for the next delta; those of the base are overwritten."""

    def run(self, ready: Iterator[Bucket], deadline: Deadline) -> Manifest:
        """Write all buckets, then the manifest."""
        writing: deque[Future[list[TensorEntry]]] = deque()
        slots = Semaphore(WRITERS + 1)  # one more is ready, so that no writer waits for it
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="weights-write") as writers:
            try:
                for number in count():
                    slots.acquire()
                    bucket = next(ready, None)
                    if bucket is None:
                        break
                    deadline.check()
                    writing.append(writers.submit(self._write, number, bucket))
                    writing[-1].add_done_callback(lambda _: slots.release())
                    del bucket  # as soon as it was written it may be freed
                    while writing and writing[0].done():
                        self._entries += writing.popleft().result()
                while writing:
                    self._entries += writing.popleft().result()
            finally:
                for waiting in writing:
                    waiting.cancel()
        self._store.sync()
        deadline.check()
        ref = None if self._base is None else self._base.ref
        kind: Kind = "full" if ref is None else "delta"
        manifest = make_manifest(self._version, self._entries, kind, ref)
        self._store.write_text(self._version, MANIFEST_NAME, manifest.model_dump_json())
        return manifest

    def _write(self, number: int, bucket: Bucket) -> list[TensorEntry]:
        blob = make_blob(number, [(name, t, self._encode(name, t)) for name, t in bucket])
        written = self._store.write_blob(self._version, blob.name, blob.pieces)
        if not blob.is_finite(written):
            check_finite(bucket, f"version {self._version}")
        entries = blob.entries(written)
        self._store.write_text(self._version, part_name(number), write_part(entries))
        return entries

    def _encode(self, name: str, value: torch.Tensor) -> Encoded:
        if self._config.quantization is not None:
            return encode_quantized(value, self._config.quantization)
        if self._config.delta is None:
            return plain(value)
        base = None if self._base is None else self._base.tensors.get(name)
        if base is None or (base.shape, base.dtype) != (value.shape, value.dtype):
            self.kept[name] = value.clone()
            return plain(self.kept[name])
        encoded = encode_delta(value, base, self._config.delta.level)
        if encoded.codec == "raw":
            encoded = plain(value)
        self.kept[name] = base.copy_(value)
        return encoded
