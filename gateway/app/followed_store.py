"""A directory in which somebody else's trainer leaves versions: each is published when it is complete.

    weight_v000001/     a Hugging Face directory, or what changed since another one
    latest              optional: name of the version that is to serve, also below a directory of its run

See `weight_sync.checkpoint_deltas`, with which the servers read it.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge

from gateway.app.foreign_weights import ForeignWeights
from gateway.publishing.updates import WeightUpdates
from headway.contracts.checkpoint_store import (
    INDEX_NAME,
    POINTER_NAME,
    PREFIX,
    number_of,
    version_name,
)
from headway.contracts.config.gateway import FollowConfig
from headway.contracts.errors import DataError, ServiceError

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
        self._root = Path(config.path).resolve()
        self._interval_s = config.interval_s
        self._weights = weights
        self._updates = updates
        self._identity: Identity | None = None
        """Identity of the version that was published last; None if we have not seen it."""
        self.failure: str | None = None
        """Why the newest version was refused; None if it was not."""
        Gauge(
            "headway_follow_refused_versions",
            "1 while the newest version of the followed store is refused",
            registry=metrics,
        ).set_function(lambda: self.failure is not None)

    async def run(self) -> None:
        """Look again and again; ends when it is cancelled."""
        while True:
            try:
                await self.look()
            except (ServiceError, OSError) as error:
                if str(error) != self.failure:  # said once
                    log.warning(
                        "not published", extra={"store": str(self._root), "why": str(error)}
                    )
                self.failure = str(error)
            await asyncio.sleep(self._interval_s)

    async def look(self) -> None:
        """Publish the newest version, unless it is the last one that was published.

        Raises:
            ServiceError: it was refused; the old one serves on.
        """
        folder, identity = await asyncio.to_thread(_newest, self._root)
        if folder is None:
            return
        if self._weights.newest_path == str(folder) and self._identity in (None, identity):
            self._identity = identity  # before a restart of ours it may have been another one
            self.failure = None
            return
        await self._weights.publish(self._updates, str(folder), _label(folder), aborts=False)
        self._identity, self.failure = identity, None


def _label(folder: Path) -> str:
    return str(number_of(folder.name))


def _newest(root: Path) -> tuple[Path | None, Identity | None]:
    folder = newest_version(root)
    return folder, None if folder is None else identity_of(folder)


def newest_version(root: Path) -> Path | None:
    """Return the directory of the version that is to serve; None while there is none.

    It is what `latest` names, else the complete one with the highest number.

    Raises:
        DataError: `latest` names no version.
    """
    pointer = root / POINTER_NAME
    if pointer.is_file():
        with pointer.open() as file:
            text = file.read(MAX_POINTER_CHARS).strip()
        run, _, name = text.rpartition("/")
        number = number_of(f"{PREFIX}{name.removeprefix(PREFIX)}")
        if number is None or run.startswith("/") or ".." in run.split("/"):
            raise DataError(f"{pointer} holds {text[:80]!r}; wanted is a name like weight_v000007")
        folder = root / run / version_name(number)
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
