"""A version on its way in: every tensor is read, decoded and checked, on several threads at once.

A tensor whose bytes are wrong is read once more, then from the other places that hold the version,
alone. Nothing is allocated for an entry that does not fit the model.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from headway.contracts.errors import SyncError
from headway.contracts.types import WeightUpdateMeta
from weight_sync.channel import ReadTensor, Source
from weight_sync.codecs import check_stored_size, decode
from weight_sync.deadline import Deadline
from weight_sync.device_copy import beside_serving, for_serving
from weight_sync.manifest import Base, Manifest, TensorEntry, content_digest, has_checksum
from weight_sync.pieces import look_through
from weight_sync.tensors import check_finite, check_fit

Shapes = Mapping[str, torch.Size]
DECODERS = max(1, min(4, (os.cpu_count() or 1) // 4))
"""Threads that decode; those of a small machine have to generate."""
READ_AHEAD = 8
"""Tensors that are read and not yet decoded."""
MIN_EXTRA_BYTES = 64 << 20
"""Most bytes of tensors that a small model does not have, adapters' for example."""
EXTRA_BYTES_PER_ELEMENT = 4
"""Bytes of such tensors for each element of the model."""


class IncomingVersion:
    """One version while it comes in."""

    def __init__(
        self,
        source: Source,
        meta: WeightUpdateMeta,
        expected: Shapes,
        deadline: Deadline,
        find_base: Callable[[Base], ReadTensor],
        find_copies: Callable[[TensorEntry], Iterable[tuple[TensorEntry, torch.Tensor]]],
    ) -> None:
        """
        Args:
            find_base: returns what reads the tensors of the version that a delta builds on.
            find_copies: brings the stored bytes of one tensor from other places.
        Raises:
            SyncError: it is another version, or a delta whose base is not to be had.
        """
        self._source = source
        self._meta = meta
        self._expected = expected
        self._deadline = deadline
        self._find_copies = find_copies
        self._base: ReadTensor | None = None
        self._is_repaired = False
        self._extra_bytes_left = max(
            MIN_EXTRA_BYTES, EXTRA_BYTES_PER_ELEMENT * sum(map(torch.Size.numel, expected.values()))
        )
        announced = source.announcement
        if announced.version != meta.version:
            raise SyncError(f"{meta.path} holds version {announced.version}, not {meta.version}")
        if announced.kind == "delta" and announced.base is not None:
            self._base = find_base(announced.base)

    def collect(self) -> dict[str, torch.Tensor]:
        """Return all tensors, verified."""
        return dict(self._verified())

    def verify_in_place(self) -> bool:
        """Verify all tensors and keep none; false if the files do not contain them as they are."""
        shapes = {}
        for name, tensor in self._verified():
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

    def _verified(self) -> Iterator[tuple[str, torch.Tensor]]:
        seen: list[TensorEntry] = []
        decoding: deque[tuple[TensorEntry, Future[torch.Tensor]]] = deque()
        with ThreadPoolExecutor(DECODERS, thread_name_prefix="weights-decode") as decoders:
            for entry in self._source.entries():
                self._check_entry(entry)
                payload = self._source.read(entry)
                seen.append(entry)
                if entry.codec == "raw":  # checked here, while it is in the cache
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
            self._deadline.check()
        self._is_repaired = True
        for other, payload in self._find_copies(entry):
            try:
                return self._check(other, payload)
            except SyncError:
                continue
        raise failure

    def _check(self, entry: TensorEntry, payload: torch.Tensor) -> torch.Tensor:
        if payload.is_cpu:
            return self._verified_values(entry, payload)
        with beside_serving(payload.device):
            return for_serving(self._verified_values(entry, payload))

    def _verified_values(self, entry: TensorEntry, payload: torch.Tensor) -> torch.Tensor:
        tensor = self._decoded(entry, payload)
        if entry.is_finite:
            is_right, is_finite = has_checksum(tensor, entry.checksum), True
        else:
            is_right, is_finite = look_through(tensor, entry.checksum)
        if not is_right:
            raise SyncError(f"{entry.name} in {self._meta.path}/{entry.blob} has a wrong checksum")
        if not is_finite:
            check_finite([(entry.name, tensor)], self._meta.path)
        return tensor

    def _decoded(self, entry: TensorEntry, payload: torch.Tensor) -> torch.Tensor:
        needs_base = entry.codec in ("same", "sparse", "dense")
        if needs_base and self._base is None:
            raise SyncError(f"{entry.name} in {self._meta.path} is a difference without a base")
        try:
            base = self._base(entry.name) if needs_base and self._base is not None else None
        except KeyError:
            raise SyncError(f"the base of {self._meta.path} has no {entry.name}") from None
        return decode(entry, payload, base)

    def _check_entry(self, entry: TensorEntry) -> None:
        """Check an entry before memory is allocated for it."""
        expected = self._expected.get(entry.name)
        if expected is not None and expected != entry.shape:
            raise SyncError(
                f"{self._meta.path} is of another model: {entry.name} has shape {entry.shape}, "
                f"{tuple(expected)} in the model"
            )
        check_stored_size(entry)
        if expected is None and self._expected:
            self._extra_bytes_left -= entry.size
            if self._extra_bytes_left < 0:
                raise SyncError(
                    f"{self._meta.path} is of another model: {entry.name} and others that the model has "
                    "not are larger than the model"
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
