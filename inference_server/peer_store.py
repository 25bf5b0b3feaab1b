"""Served version of this server, laid out as a version directory: `manifest.json`, and a blob per
tensor.

Peers fetch from here, so that the publisher has to send a version only once. Tensors are sent as they are
in memory, and nothing is computed: the manifest is that of the publisher, with the same digest. A version
that an engine reads from a folder is served as that folder's own files, those that its manifest names.

Nothing here holds a version: one that is not served any more is gone once the running responses end.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.contracts.errors import NotFound
from headway.contracts.types import PolicyVersion
from weight_sync.channel import StagedWeights, VerifiedVersion
from weight_sync.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorEntry,
    bytes_of,
    make_manifest,
    parse_manifest,
    torch_dtype,
)

Held = StagedWeights | VerifiedVersion


@dataclass(frozen=True, slots=True)
class _Layout:
    """Version in the form of a directory."""

    version: PolicyVersion
    digest: str
    manifest: bytes
    tensors: Mapping[str, str]
    """Blob -> the tensor in it; in a folder, its files by themselves."""


class PeerStore:
    """Versions as peers see them; used on one event loop.

    Args:
        find: returns a held version; None serves none.
    """

    def __init__(self, find: Callable[[PolicyVersion], Held | None] | None) -> None:
        self._find = find
        self._layout: _Layout | None = None
        self._laying = asyncio.Lock()

    async def read(self, version: PolicyVersion, name: str) -> memoryview | Path:
        """One file of a version's directory, in memory or on disk.

        Raises:
            NotFound: it has none of this name, is not held here, or is not given away.
        """
        if self._find is None:
            raise NotFound("this server gives no weights to others (weights.peers is false)")
        held = self._find(version)
        if held is None:
            raise NotFound(f"version {version} is not held here")
        layout = await self._layout_of(held)
        if name == MANIFEST_NAME:
            return memoryview(layout.manifest)
        if name not in layout.tensors:
            raise NotFound(f"version {version} has no {name}")
        if isinstance(held, VerifiedVersion):
            return await asyncio.to_thread(_existing, held.folder / name)
        tensor = held.tensors[layout.tensors[name]]
        return bytes_of(tensor if tensor.is_cpu else await asyncio.to_thread(tensor.cpu))

    async def _layout_of(self, held: Held) -> _Layout:
        async with self._laying:  # the first of many peers lays it out
            known = self._layout
            if known is None or (known.version, known.digest) != (held.version, held.digest):
                known = self._layout = await asyncio.to_thread(_lay_out, held)
            return known


def _lay_out(held: Held) -> _Layout:
    if isinstance(held, VerifiedVersion):
        manifest = _manifest_in(held.folder)
        tensors = {entry.blob: entry.blob for entry in manifest.tensors}
    else:
        manifest, tensors = _manifest_of(held)
    if (manifest.version, manifest.digest) != (held.version, held.digest):
        raise _not_as_published(held)
    text = manifest.model_dump_json().encode()
    return _Layout(held.version, held.digest, text, tensors)


def _manifest_in(folder: Path) -> Manifest:
    file = folder / MANIFEST_NAME
    return parse_manifest(_existing(file).read_bytes(), str(file))


def _manifest_of(staged: StagedWeights) -> tuple[Manifest, dict[str, str]]:
    """One blob per tensor; a tied weight that was published under two names is in one."""
    places: dict[tuple[str, str], str] = {}
    tensors = {}
    for entry in staged.entries:
        if entry.name in staged.tensors:
            blob = places.setdefault((entry.checksum, entry.dtype), f"t-{len(places):05d}")
            tensors[blob] = entry.name
    entries = [_placed(entry, places) for entry in staged.entries]
    known = [entry for entry in entries if entry is not None]
    if len(known) != len(entries) or not known:
        raise _not_as_published(staged)
    return make_manifest(staged.version, known), tensors


def _placed(entry: TensorEntry, places: Mapping[tuple[str, str], str]) -> TensorEntry | None:
    """The entry as we store it; None if we do not have its values."""
    blob = places.get((entry.checksum, entry.dtype))
    if blob is None:
        return None
    size = math.prod(entry.shape) * torch_dtype(entry.dtype).itemsize
    return entry.model_copy(update={"blob": blob, "offset": 0, "size": size, "codec": "raw"})


def _existing(file: Path) -> Path:
    if not file.is_file():
        raise NotFound(f"{file.name} is not here any more")
    return file


def _not_as_published(held: Held) -> NotFound:
    return NotFound(f"version {held.version} is held here, but not as it was published")
