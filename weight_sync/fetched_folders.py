"""Directories of an object store, fetched into one of this machine before they are read.

Only those stay that the version that serves was read from, and the one that is read. A file counts once
it is whole; one that did not change is not fetched again. What an earlier process left is removed.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from urllib.parse import quote

from fsspec.callbacks import Callback

from headway.contracts.errors import ConfigError, SyncError
from headway.runtime.object_stores import identity_of, listed, open_objects, os_errors
from weight_sync.checkpoint_deltas import ANNOUNCED_NAME
from weight_sync.deadline import Deadline
from weight_sync.folder_cache import own_store
from weight_sync.manifest import MANIFEST_NAME
from weight_sync.transports.base import SCHEMES, scheme_of
from weight_sync.transports.daemon_calls import call_detached
from weight_sync.transports.disk import LocalStore

ENDINGS = (".safetensors", ".json", ".jinja", ".model", ".txt", ANNOUNCED_NAME)
"""Of files that are fetched."""
LOOK_S = 0.2
"""Pause between looks at a version that is being written."""
T = TypeVar("T")
Infos = dict[str, dict[str, Any]]
"""File -> what fsspec says of it."""


class FetchedFolders:
    """What this process fetched, and needs."""

    def __init__(self, cache_dir: str | None) -> None:
        """
        Args:
            cache_dir: holds the fetched ones below `fetched`; None takes a directory of its own.
        Raises:
            SyncError: it cannot be had.
        """
        self._is_ours = cache_dir is None
        self._store = own_store() if cache_dir is None else _store_in(Path(cache_dir))
        self._served: set[Path] = set()
        self._read: set[Path] = set()
        """Of the version that was read last."""
        self._identities: dict[Path, str] = {}
        """File that is here -> identity of the object that it was."""

    def fetch(self, url: str, deadline: Deadline, is_base: bool = False) -> Path | None:
        """Fetch what a directory holds now; return where it is, or None if there is none.

        Args:
            is_base: of the version that was fetched before.
        Raises:
            SyncError: it is in no object store, or cannot be read, or does not fit on the disk.
        """
        parent, _, name = url.rstrip("/").rpartition("/")
        if scheme_of(url) in SCHEMES or "::" in url or name in ("", ".", ".."):
            raise SyncError(f"{url} is neither a directory nor one in an object store")
        if not is_base:
            self._remove_all_but(self._served | self._read)
            self._read = set()
        folder = self._store.root / quote(parent, safe=":") / name
        self._read.add(folder)
        try:
            with os_errors():
                return self._fetch(url, folder, deadline)
        except ConfigError as error:
            raise SyncError(error.message) from error
        except OSError as error:
            raise SyncError(f"{url} cannot be fetched: {error}") from error

    def keep(self) -> None:
        """The version that was read last serves now."""
        self._served = set(self._read)
        self._remove_all_but(self._served)

    def close(self) -> None:
        """Leave nothing behind."""
        self._remove_all_but(set())
        self._store.close()
        if self._is_ours:
            shutil.rmtree(self._store.root, ignore_errors=True)

    def _fetch(self, url: str, folder: Path, deadline: Deadline) -> Path | None:
        objects, base = open_objects(url)
        while ANNOUNCED_NAME in (infos := _within(deadline, lambda: _infos(objects, base))):
            time.sleep(LOOK_S)  # it is being written
        if not infos:
            return None
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.iterdir():
            if self._identities.get(file) != identity_of(infos.get(file.name, {})):
                file.unlink()
        missing = [name for name in infos if not (folder / name).exists()]
        with TemporaryDirectory(dir=self._store.root, ignore_cleanup_errors=True) as part:
            pairs = [f"{base}/{name}" for name in missing], [f"{part}/{name}" for name in missing]
            _within(deadline, lambda: objects.get(*pairs, callback=_Progress(deadline)))
            for name in missing:
                size = Path(part, name).stat().st_size
                if size != infos[name]["size"]:
                    raise SyncError(
                        f"{url}/{name} is torn: {size} bytes came of {infos[name]['size']}"
                    )
                Path(part, name).replace(folder / name)
                self._identities[folder / name] = identity_of(infos[name])
        return folder

    def _remove_all_but(self, wanted: set[Path]) -> None:
        for folder in {file.parent for file in self._identities} - wanted:
            self._remove(folder)

    def _remove(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._identities = {
            file: identity for file, identity in self._identities.items() if file.parent != folder
        }


def _store_in(cache_dir: Path) -> LocalStore:
    """Open an empty directory there."""
    try:
        store = LocalStore(str(cache_dir / "fetched"), is_durable=False)
        for folder in store.root.iterdir():
            if folder.is_dir():
                shutil.rmtree(folder)
    except OSError as error:
        raise SyncError(f"cannot fetch versions: {error}; set weights.cache_dir") from error
    return store


class _Progress(Callback):
    """Puts a deadline off for what comes."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self._deadline = deadline

    def branched(self, *_: Any, **__: Any) -> _Progress:
        """The one of each file."""
        return self

    def call(self, *_: Any, **__: Any) -> None:
        """Called for each piece."""
        self._deadline.restart()


def _infos(objects: Any, base: str) -> Infos:
    """The files of a directory that are fetched: of a version of ours its manifest alone."""
    infos = {n: info for n, info in listed(objects, base).items() if info["type"] == "file"}
    if MANIFEST_NAME in infos:
        return {MANIFEST_NAME: infos[MANIFEST_NAME]}
    return {name: info for name, info in infos.items() if name.endswith(ENDINGS)}


def _within(deadline: Deadline, work: Callable[[], T]) -> T:
    deadline.check()
    return call_detached(work, deadline.check)
