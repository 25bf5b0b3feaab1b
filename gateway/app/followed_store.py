"""A store in which somebody else's trainer leaves versions: each is published when it is complete.

    weight_v000001/     a Hugging Face directory, or what changed since another one
    latest              optional: name of the version that is to serve, also below a directory of its run

It is a directory, or an object store by its URL. See `weight_sync.checkpoint_deltas`, with which the
servers read it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from gateway.app.followed_objects import FollowedObjects, Newest
from gateway.app.foreign_weights import ForeignWeights
from gateway.publishing.updates import WeightUpdates
from headway.contracts.checkpoint_store import (
    INDEX_NAME,
    POINTER_NAME,
    PREFIX,
    named_version,
    number_of,
)
from headway.contracts.config.gateway import FollowConfig
from headway.contracts.errors import ServiceError
from headway.runtime.object_stores import is_url

log = logging.getLogger(__name__)

MAX_POINTER_CHARS = 512
Identity = tuple[int, int, int]


class FollowedStore:
    """Publishes the newest version, and again what failed until it is mended or a newer one is there."""

    def __init__(
        self,
        config: FollowConfig,
        weights: ForeignWeights,
        updates: WeightUpdates,
        metrics: CollectorRegistry,
    ) -> None:
        """
        Raises:
            ConfigError: no package is installed that reads the store's URL.
        """
        path = config.path.removeprefix("file://")
        self._objects = FollowedObjects(path) if is_url(path) else None
        self._path = path if is_url(path) else str(Path(path).resolve())
        self._interval_s = config.interval_s
        self._weights = weights
        self._updates = updates
        self._identity: object = None
        """Identity of the version that was published last; None if we have not seen it."""
        self.failure: str | None = None
        """Why the newest version was refused, or not found; None if neither is so."""
        Gauge(
            "headway_follow_refused_versions",
            "1 while the newest version of the followed store is refused, or the store cannot be read",
            registry=metrics,
        ).set_function(lambda: self.failure is not None)

    async def run(self) -> None:
        """Look again and again; ends when it is cancelled."""
        while True:
            try:
                await self.look()
            except (ServiceError, OSError) as error:
                if str(error) != self.failure:  # said once
                    log.warning("not published", extra={"store": self._path, "why": str(error)})
                self.failure = str(error)
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Publish the newest version, unless it is the last one that was published.

        Raises:
            ServiceError: it was refused; the old one serves on.
        """
        place, identity = await self._newest()
        if place is None:
            self.failure = None
            return
        if self._weights.newest_path == place and self._identity in (None, identity):
            self._identity = identity  # before a restart of ours it may have been another one
            self.failure = None
            return
        await self._weights.publish(self._updates, place, _label(place), aborts=False)
        self._identity, self.failure = identity, None

    async def _newest(self) -> Newest:
        if self._objects is not None:
            return await self._objects.newest()
        return await asyncio.to_thread(_newest, Path(self._path))


def _label(place: str) -> str:
    return str(number_of(place.rpartition("/")[2]))


def _newest(root: Path) -> Newest:
    folder = newest_version(root)
    return (None, None) if folder is None else (str(folder), identity_of(folder))


def newest_version(root: Path) -> Path | None:
    """Return the directory of the version that is to serve; None while there is none.

    It is what `latest` names, else the complete one with the highest number.

    Raises:
        DataError: `latest` names no version.
    """
    pointer = root / POINTER_NAME
    if pointer.is_file():
        with pointer.open() as file:
            text = file.read(MAX_POINTER_CHARS)
        folder = root / named_version(text, pointer)
        return folder if folder.is_dir() else None
    complete = {
        number: each
        for each in root.glob(f"{PREFIX}*")
        if (number := number_of(each.name)) is not None and (each / INDEX_NAME).is_file()
    }
    return complete[max(complete)] if complete else None


def identity_of(folder: Path) -> Identity | None:
    """Return what another version of the same name would not have; None without an index."""
    try:
        index = (folder / INDEX_NAME).stat()
    except FileNotFoundError:
        return None
    return index.st_ino, index.st_mtime_ns, index.st_size
