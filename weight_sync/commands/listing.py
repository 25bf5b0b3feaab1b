"""`headway weights ls`: which versions there are."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from headway.contracts.errors import SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.commands.catalog import Catalog
from weight_sync.commands.output import print_json, print_table, readable_bytes
from weight_sync.commands.tensor_values import plain_bytes
from weight_sync.manifest import Manifest, TensorEntry

RECENT_S = 60.0
"""An incomplete version to which something came within this time is still being written."""
COLUMNS = (
    "version",
    "state",
    "kind",
    "base",
    "chain",
    "tensors",
    "parameters",
    "stored",
    "of full",
    "written",
    "digest",
)

Manifests = Mapping[PolicyVersion, Manifest]


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One version."""

    version: PolicyVersion
    state: str
    """complete, being written, unfinished, damaged (its manifest is), base missing"""
    kind: str | None = None
    base: PolicyVersion | None = None
    chain: int | None = None
    """Versions that it is based on."""
    tensors: int = 0
    parameters: int = 0
    stored_bytes: int = 0
    share_of_full: float | None = None
    written_at: float | None = None
    """Seconds since 1970."""
    digest: str | None = None


def list_versions(root: str, as_json: bool) -> None:
    """Print all versions of a root."""
    rows = rows_of(Catalog(root))
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    print_table(COLUMNS, [_cells(row) for row in rows], left=3)


def rows_of(catalog: Catalog) -> list[VersionRow]:
    """All versions, oldest first."""
    manifests: dict[PolicyVersion, Manifest] = {}
    damaged = set()
    versions = catalog.versions()
    for version in versions:
        try:
            manifest = catalog.manifest(version)
        except SyncError:
            damaged.add(version)
            continue
        if manifest is not None:
            manifests[version] = manifest
    rows = []
    for version in versions:
        if version in damaged:
            rows.append(VersionRow(version, "damaged", written_at=catalog.written_at(version)))
        elif version in manifests:
            rows.append(_complete(catalog, manifests, version))
        else:
            rows.append(_incomplete(catalog, version))
    return rows


def state_of(catalog: Catalog, version: PolicyVersion) -> str:
    """Return the state of a version without a manifest."""
    written_at = catalog.written_at(version)
    is_recent = written_at is not None and time.time() - written_at < RECENT_S
    return "being written" if is_recent or catalog.publisher() else "unfinished"


def _complete(catalog: Catalog, manifests: Manifests, version: PolicyVersion) -> VersionRow:
    manifest = manifests[version]
    bases, is_whole = _bases(manifests, version)
    stored = sum(entry.size for entry in manifest.tensors)
    of_model = manifests[bases[-1]] if manifest.kind == "adapter" and is_whole else manifest
    full = plain_bytes(of_model) if of_model.kind != "adapter" else 0
    return VersionRow(
        version=version,
        state="complete" if is_whole else "base missing",
        kind=manifest.kind,
        base=None if manifest.base is None else manifest.base.version,
        chain=len(bases),
        tensors=len(manifest.tensors),
        parameters=_parameters(manifest.tensors),
        stored_bytes=stored,
        share_of_full=stored / full if full else None,
        written_at=catalog.written_at(version),
        digest=manifest.digest,
    )


def _incomplete(catalog: Catalog, version: PolicyVersion) -> VersionRow:
    announced = catalog.announcement(version)
    try:
        entries = tuple(catalog.parts(version))
    except SyncError:
        entries = ()
    base = None if announced is None else announced.base
    return VersionRow(
        version=version,
        state=state_of(catalog, version),
        kind=None if announced is None else announced.kind,
        base=None if base is None else base.version,
        tensors=len(entries),
        parameters=_parameters(entries),
        stored_bytes=sum(entry.size for entry in entries),
        written_at=catalog.written_at(version),
    )


def _bases(manifests: Manifests, version: PolicyVersion) -> tuple[list[PolicyVersion], bool]:
    """Return the versions that a version builds on, nearest first, and whether all of them are there."""
    bases: list[PolicyVersion] = []
    ref = manifests[version].base
    while ref is not None:
        found = manifests.get(ref.version)
        if found is None or found.digest != ref.digest:
            return bases, False
        bases.append(ref.version)
        ref = found.base
    return bases, True


def _parameters(entries: tuple[TensorEntry, ...]) -> int:
    return sum(math.prod(entry.shape) for entry in entries)


def _cells(row: VersionRow) -> list[str]:
    written = (
        "-"
        if row.written_at is None
        else datetime.fromtimestamp(row.written_at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    )
    return [
        str(row.version),
        row.state,
        row.kind or "-",
        "-" if row.base is None else str(row.base),
        "-" if row.chain is None else str(row.chain),
        str(row.tensors),
        f"{row.parameters:,}",
        readable_bytes(row.stored_bytes),
        "-" if row.share_of_full is None else f"{row.share_of_full:.2%}",
        written,
        "-" if row.digest is None else row.digest[:12],
    ]
