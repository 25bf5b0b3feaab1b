"""`headway weights gc`: delete old versions where no publisher does it any more.

Nothing is deleted while a publisher lives: it alone knows which version is committed and which one its
next delta is against, and it deletes old versions by itself (`weight_sync.keep`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from headway.contracts.errors import ConfigError, SyncError
from headway.contracts.types import PolicyVersion
from weight_sync.commands.catalog import Catalog
from weight_sync.commands.output import print_json, print_line, readable_bytes
from weight_sync.manifest import MANIFEST_NAME
from weight_sync.store import with_bases
from weight_sync.transports.blob_reuse import FREE_NAME
from weight_sync.transports.disk import LocalStore, ObjectStore

RETIRED = "retired blobs"

Delete = Callable[[PolicyVersion], None]


@dataclass(frozen=True, slots=True)
class DeletionPlan:
    """Versions to keep and versions to delete."""

    kept: list[PolicyVersion]
    surplus: list[PolicyVersion]
    unfinished: list[PolicyVersion]

    @property
    def to_delete(self) -> list[PolicyVersion]:
        """Newest first: what builds on another goes before it."""
        return sorted([*self.surplus, *self.unfinished], reverse=True)


def collect_garbage(
    root: str,
    keep: int,
    pinned: Collection[PolicyVersion],
    is_dry: bool,
    has_no_publisher: bool,
    as_json: bool,
) -> None:
    """Delete versions that are neither among the newest nor needed; print what that freed.

    Raises:
        ConfigError: a pinned version that is not there, or a location whose publishers cannot be seen.
        SyncError: a publisher is alive, or something cannot be deleted.
    """
    catalog = Catalog(root)
    if is_dry:
        plan = make_plan(catalog, keep, pinned)
        sizes = {version: catalog.size_of(version) for version in plan.to_delete}
        _report(plan, sizes, _retired_bytes(catalog), is_dry, as_json)
        return
    with _sole_owner(catalog, has_no_publisher) as delete:
        plan = make_plan(catalog, keep, pinned)
        sizes = {}
        for version in plan.to_delete:
            size = catalog.size_of(version)
            delete(version)
            if version in catalog.versions():
                raise SyncError(
                    f"{catalog.path_of(version)} cannot be deleted; look at its owner and permissions"
                )
            sizes[version] = size
        retired = _retired_bytes(catalog)
        _delete_retired(catalog)
    _report(plan, sizes, retired, is_dry, as_json)


def make_plan(catalog: Catalog, keep: int, pinned: Collection[PolicyVersion]) -> DeletionPlan:
    """Plan to keep the newest complete versions, the pinned ones, and all that these build on."""
    versions = catalog.versions()
    complete = [v for v in versions if catalog.text(v, MANIFEST_NAME) is not None]
    missing = sorted(set(pinned) - set(complete))
    if missing:
        raise ConfigError(f"{catalog.root} has no complete version {missing[0]} to keep")

    def base_of(version: PolicyVersion) -> PolicyVersion | None:
        manifest = catalog.manifest(version)  # damaged: what it needs is unknown, so nothing goes
        return None if manifest is None or manifest.base is None else manifest.base.version

    kept = with_bases({*complete[-keep:], *pinned}, base_of)
    return DeletionPlan(
        kept=[version for version in complete if version in kept],
        surplus=[version for version in complete if version not in kept],
        unfinished=[version for version in versions if version not in complete],
    )


@contextmanager
def _sole_owner(catalog: Catalog, has_no_publisher: bool) -> Iterator[Delete]:
    """Delete as the publisher would; no publisher can begin meanwhile."""
    if catalog.folder is None:
        if not has_no_publisher:
            raise ConfigError(
                f"{catalog.root} cannot tell whether a publisher is alive; see that none is, and say "
                "so with --no-publisher"
            )
        yield ObjectStore(catalog.root).delete
        return
    try:
        store = LocalStore(str(catalog.folder), is_durable=False)
    except SyncError as error:
        raise SyncError(
            f"{error.message}; a publisher deletes old versions by itself (weight_sync.keep), and "
            "--dry-run shows what would go"
        ) from error
    except OSError as error:
        raise SyncError(f"cannot delete in {catalog.root}: {error}") from error
    try:
        yield store.delete
    finally:
        store.close()


def _retired(catalog: Catalog) -> Path | None:
    """Blobs that a publisher in shared memory kept to write them again."""
    return None if catalog.folder is None else catalog.folder / FREE_NAME


def _retired_bytes(catalog: Catalog) -> int:
    folder = _retired(catalog)
    if folder is None or not folder.is_dir():
        return 0
    return sum(file.stat().st_size for file in folder.iterdir())


def _delete_retired(catalog: Catalog) -> None:
    folder = _retired(catalog)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _report(
    plan: DeletionPlan, sizes: dict[PolicyVersion, int], retired: int, is_dry: bool, as_json: bool
) -> None:
    total = sum(sizes.values()) + retired
    if as_json:
        print_json(
            {
                "dry_run": is_dry,
                "kept": plan.kept,
                "deleted": [{"version": v, "bytes": size} for v, size in sizes.items()],
                "retired_bytes": retired,
                "freed_bytes": total,
            }
        )
        return
    verb = "would delete" if is_dry else "deleted"
    for version, size in sizes.items():
        what = "unfinished version" if version in plan.unfinished else "version"
        print_line(f"{verb} {what} {version}: {readable_bytes(size)}")
    if retired:
        print_line(f"{verb} {RETIRED}: {readable_bytes(retired)}")
    kept = ", ".join(map(str, plan.kept)) or "none"
    print_line(
        f"{'would free' if is_dry else 'freed'} {readable_bytes(total)}; versions kept: {kept}"
    )
