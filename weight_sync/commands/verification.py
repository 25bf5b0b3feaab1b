"""`headway weights verify`: check versions against their manifests.

Each stored tensor is read once: a tensor is followed from a full version through all deltas on it
before the next one is read, so memory holds one tensor per version of a chain.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field

import torch

from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.blob import by_blob, check_header
from weight_sync.codecs import decode
from weight_sync.commands.catalog import Catalog
from weight_sync.commands.listing import state_of
from weight_sync.commands.output import print_json, print_line, print_table, readable_bytes
from weight_sync.commands.tensor_values import DIFFERENCES
from weight_sync.manifest import (
    MANIFEST_NAME,
    Manifest,
    TensorEntry,
    has_checksum,
)
from weight_sync.store import BlobReader, with_bases

"""What the safetensors library accepts."""


@dataclass(frozen=True, slots=True)
class Damage:
    """Something that is not as it was written."""

    problem: str
    tensor: str | None = None
    blob: str | None = None
    offset: int | None = None


@dataclass(slots=True)
class VerificationReport:
    """One version."""

    version: PolicyVersion
    state: str = "verified"
    """verified, damaged, being written, unfinished, deleted (while it was read)"""
    num_tensors: int = 0
    stored_bytes: int = 0
    """Number of bytes read."""
    damages: list[Damage] = field(default_factory=list)


def verify_versions(root: str, versions: Collection[PolicyVersion], as_json: bool) -> None:
    """Print which versions are verified and which are damaged.

    Raises:
        ConfigError: a version that is not there.
        SyncError: something is damaged, or a version that was asked for is not complete.
    """
    catalog = Catalog(root)
    since = time.monotonic()
    reports = Verification(catalog, versions).run()
    seconds = time.monotonic() - since
    num_bytes = sum(report.stored_bytes for report in reports)
    wanted = [report for report in reports if not versions or report.version in versions]
    if as_json:
        print_json(
            {
                "versions": [asdict(report) for report in wanted],
                "bytes": num_bytes,
                "seconds": seconds,
                "gb_per_s": num_bytes / seconds / 1e9,
            }
        )
    else:
        _print_reports(wanted, num_bytes, seconds)
    _raise_for(wanted, bool(versions))


class Verification:
    """Versions and all that they are based on."""

    def __init__(self, catalog: Catalog, versions: Collection[PolicyVersion]) -> None:
        self._catalog = catalog
        there = catalog.versions()
        missing = sorted(set(versions) - set(there))
        if missing:
            raise ConfigError(
                f"{catalog.root} has no version {missing[0]}; there are {_numbers(there)}"
            )
        self._reports: dict[PolicyVersion, VerificationReport] = {}
        self._manifests: dict[PolicyVersion, Manifest] = {}
        self._entries: dict[PolicyVersion, dict[str, TensorEntry]] = {}
        self._readers: dict[PolicyVersion, BlobReader] = {}
        for version in with_bases(versions or there, self._load):
            self._check_base(version)

    def run(self) -> list[VerificationReport]:
        """Read everything."""
        with ExitStack() as stack:
            for version in self._manifests:
                self._readers[version] = self._catalog.open(version)
                stack.callback(self._readers[version].close)
                self._check_headers(version)
            for version in self._manifests:
                if self._is_root(version):
                    self._verify_tree(version)
        for version, report in self._reports.items():
            if report.damages:
                is_there = self._catalog.text(version, MANIFEST_NAME) is not None
                report.state = "damaged" if is_there else "deleted"
        return [self._reports[version] for version in sorted(self._reports)]

    def _load(self, version: PolicyVersion) -> PolicyVersion | None:
        """Read a manifest; the version that it is based on."""
        report = self._reports[version] = VerificationReport(version)
        try:
            manifest = self._catalog.manifest(version)
        except SyncError as error:
            report.damages.append(Damage(error.message, blob=MANIFEST_NAME))
            return None
        if manifest is None:
            report.state = state_of(self._catalog, version)
            return None
        report.num_tensors = len(manifest.tensors)
        self._manifests[version] = manifest
        self._entries[version] = {entry.name: entry for entry in manifest.tensors}
        if len(self._entries[version]) != len(manifest.tensors):
            report.damages.append(Damage("a name is there twice", blob=MANIFEST_NAME))
        base = manifest.base
        if base is None:
            return None
        return base.version if base.version in self._catalog.versions() else None

    def _check_base(self, version: PolicyVersion) -> None:
        manifest = self._manifests.get(version)
        if manifest is None or manifest.base is None:
            return
        base = self._manifests.get(manifest.base.version)
        if base is None or base.digest != manifest.base.digest:
            seen = "is not there" if base is None else f"has the digest {base.digest[:12]}"
            problem = (
                f"its base, version {manifest.base.version} with the digest "
                f"{manifest.base.digest[:12]}, {seen}"
            )
            self._reports[version].damages.append(Damage(problem, blob=MANIFEST_NAME))

    def _base_of(self, version: PolicyVersion) -> PolicyVersion | None:
        """Return the version that a version's tensors are differences against."""
        manifest = self._manifests[version]
        if manifest.kind != "delta" or manifest.base is None:
            return None
        base = self._manifests.get(manifest.base.version)
        return None if base is None or base.digest != manifest.base.digest else base.version

    def _is_root(self, version: PolicyVersion) -> bool:
        return self._base_of(version) is None

    def _verify_tree(self, root: PolicyVersion) -> None:
        children: dict[PolicyVersion, list[PolicyVersion]] = {}
        for version in self._manifests:
            base = self._base_of(version)
            if base is not None:
                children.setdefault(base, []).append(version)
        tree = [root]
        for version in tree:
            tree += children.get(version, [])
        names = dict.fromkeys(name for version in tree for name in self._entries[version])
        for name in names:
            values: dict[PolicyVersion, torch.Tensor | None] = {}
            for version in tree:
                base = self._base_of(version)
                values[version] = self._prove(
                    version, name, None if base is None else values.get(base)
                )

    def _prove(
        self, version: PolicyVersion, name: str, base: torch.Tensor | None
    ) -> torch.Tensor | None:
        entry, report = self._entries[version].get(name), self._reports[version]
        if entry is None:
            return None
        try:
            if entry.codec in DIFFERENCES and base is None:
                raise SyncError("its base is damaged or missing")
            payload = self._readers[version].read(entry.blob, entry.offset, entry.size)
            report.stored_bytes += entry.size
            tensor = decode(entry, payload, base)
            if not has_checksum(tensor, entry.checksum):
                raise SyncError("it has a wrong checksum")
        except SyncError as error:
            report.damages.append(Damage(error.message, name, entry.blob, entry.offset))
            return None
        return tensor

    def _check_headers(self, version: PolicyVersion) -> None:
        """An engine that reads the files goes by their headers, not by the manifest."""
        for blob, entries in by_blob(self._manifests[version]).items():
            try:
                check_header(self._readers[version], blob, entries)
            except SyncError as error:
                self._reports[version].damages.append(Damage(error.message, blob=blob, offset=0))


def _print_reports(reports: Iterable[VerificationReport], num_bytes: int, seconds: float) -> None:
    reports = list(reports)
    rows = [
        [str(r.version), r.state, str(r.num_tensors), readable_bytes(r.stored_bytes)]
        for r in reports
    ]
    print_table(["version", "state", "tensors", "read"], rows, left=2)
    for report in reports:
        for damage in report.damages:
            where = "" if damage.blob is None else f" in {damage.blob}"
            where += "" if damage.offset is None else f" at {damage.offset}"
            print_line(
                f"version {report.version}: {damage.tensor or 'files'}{where}: {damage.problem}"
            )
    rate = num_bytes / seconds / 1e9
    print_line(f"read {readable_bytes(num_bytes)} in {seconds:.2f} s: {rate:.2f} GB/s")


def _raise_for(reports: Iterable[VerificationReport], is_named: bool) -> None:
    damaged = [report.version for report in reports if report.state == "damaged"]
    if damaged:
        raise SyncError(
            f"damaged: {_numbers(damaged)}; publish again, and delete these with their files"
        )
    absent = [report for report in reports if report.state != "verified"]
    if is_named and absent:
        raise SyncError(
            "not verified: "
            + ", ".join(f"version {report.version} ({report.state})" for report in absent)
        )


def _numbers(versions: Collection[PolicyVersion]) -> str:
    return ("versions " if len(versions) != 1 else "version ") + ", ".join(map(str, versions))
